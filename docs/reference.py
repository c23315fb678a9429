"""Writes the pages that are made from the code: `python docs/reference.py`.

docs/settings.md is committed, and a test compares it with the source. docs/reference/ is for the site alone.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from ring_notebook import config, errors
from ring_notebook.launch import ringrun_options
from ring_notebook.notebook.magics.options import RING, SCALE, TRAIN, LineParser

SETTINGS = Path(__file__).with_name("settings.md")
SITE = Path(__file__).with_name("reference")
_SETTINGS_HEAD = """# Settings

<!-- Written by `python docs/reference.py` from ring_notebook/config.py. -->

Environment variables, read once by each process. Set them before `%ring start`, `ringrun` or `ring_notebook.run`, which
pass them on to the ranks. A value that cannot be read is an error that names the variable. Horovod's names in brackets
work too.

| Variable | Default | What it does |
|---|---|---|
"""
_MAGICS_HEAD = """# Every magic and option

`%ring help` shows the same in a notebook, and Tab completes it. [Magics and commands](../magics.md): by purpose.
"""
_RINGRUN_HEAD = """# Every option of ringrun

    ringrun -np N [options] program [arguments]

`ringrun --help` shows the same. Options of `horovodrun` have their names.
"""
_API = {
    "cells": ("In a cell or script: ring", "ring_notebook.torch", "ring_notebook.torch.elastic"),
    "python": ("In the notebook's Python: ring_notebook", "ring_notebook", "ring_notebook.errors"),
    "engines": ("On Ray, Dask, Spark and pods", *(f"ring_notebook.{name}" for name in ("ray", "dask", "spark", "k8s"))),
}
"""By page: its title, and the modules whose public names it has."""


def _docstrings() -> dict[str, str]:
    (record,) = (
        node
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == config.Config.__name__
    )
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(record.body, record.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def settings() -> str:
    """The page of settings. Raises KeyError for a setting without a docstring."""
    docs = _docstrings()
    rows = []
    for field in fields(config.Config):
        name, _, text = re.sub(r"\s+", " ", docs[field.name]).partition(": ")
        variable, _, alias = name.partition(" (")
        default = "empty" if field.default == "" else f"`{field.default}`"
        text = text.replace("``", "`").replace("|", "\\|")
        named = f"`{variable}` (`{alias[:-1]}`)" if alias else f"`{variable}`"
        rows.append(f"| {named} | {default} | {text[0].upper()}{text[1:]} |\n")
    return _SETTINGS_HEAD + "".join(rows)


def _rows(options: list[argparse.Action]) -> Iterator[str]:
    for option in options:
        if option.help != argparse.SUPPRESS:
            value = "" if option.nargs == 0 else str(option.metavar or "|".join(option.choices or ()) or option.dest)
            name = " ".join(filter(None, [", ".join(option.option_strings), value])).replace("|", "\\|")
            yield f"| `{name}` | {_text(option.help or '')} |\n"


def _text(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|")


def _table(options: list[argparse.Action]) -> str:
    rows = "".join(_rows(options))
    return f"\n| Option | What it does |\n|---|---|\n{rows}" if rows else ""


def magics() -> str:
    """The page of the magics, their commands and options."""
    page = _MAGICS_HEAD
    for parser in (TRAIN, SCALE, RING):
        page += f"\n## {parser.prog}\n\n{_sentence(parser)}\n{_table(parser.options)}"
        for name, command in parser.commands.items():
            page += f"\n### {parser.prog} {name}\n\n{_sentence(command)}\n{_table(command.options)}"
    return page


def _sentence(parser: LineParser) -> str:
    about = _text(parser.about)
    return f"{about[0].upper()}{about[1:]}."


def ringrun() -> str:
    """The page of ringrun's options."""
    page = _RINGRUN_HEAD
    for group in ringrun_options._parser()._action_groups:
        options = [one for one in group._group_actions if one.option_strings and one.dest != "help"]
        title = "" if group.title in ("options", "positional arguments") else f"\n## {str(group.title).capitalize()}\n"
        about = f"\n{group.description}\n" if title and group.description else ""
        page += f"{title}{about}{_table(options)}" if options else ""
    return page


def _api(title: str, *modules: str) -> str:
    rows = ""
    for module in modules:
        # Each error stands once, in the module that defines it.
        twice = [] if module == errors.__name__ else [name for name in vars(errors) if name[:1].isupper()]
        rows += f"\n.. automodule:: {module}\n   :exclude-members: {', '.join(twice)}\n"
    return f"# {title}\n\n```{{eval-rst}}{rows}```\n"


def write() -> None:
    """Write all pages; one that has not changed stays as it is, so that Sphinx does not read it again."""
    pages = {SETTINGS: settings(), SITE / "magics.md": magics(), SITE / "ringrun.md": ringrun()}
    pages |= {SITE / f"{name}.md": _api(*content) for name, content in _API.items()}
    SITE.mkdir(exist_ok=True)
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write()
