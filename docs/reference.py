"""Writes what is made from the code: `python docs/reference.py`.

The pages docs/settings.md and docs/magics.md and the enums in ring_notebook/_core.pyi are committed, and a test
compares them with the source. docs/reference/ is for the site alone.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from ring_notebook import _core, config, errors
from ring_notebook.launch import ringrun_options
from ring_notebook.launch.lent_places import LENDERS
from ring_notebook.notebook.lab.answers import Answer, schema
from ring_notebook.notebook.lab.conditions import CONDITIONS
from ring_notebook.notebook.lab.tools import PERMISSIONS, TOOLS
from ring_notebook.notebook.line_command import Command
from ring_notebook.notebook.magics.commands import GROUPS, MAGICS

SETTINGS = Path(__file__).with_name("settings.md")
MAGICS_PAGE = Path(__file__).with_name("magics.md")
AGENTS_PAGE = Path(__file__).with_name("agents.md")
STUB = Path(config.__file__).with_name("_core.pyi")
SITE = Path(__file__).with_name("reference")
_SETTINGS_HEAD = """# Settings

<!-- Written by `python docs/reference.py` from ring_notebook/config.py. -->

Environment variables, read once by each process. Set them before `%ring start`, `ringrun` or `ring_notebook.run`, which
pass them on to the ranks. A value that cannot be read is an error that names the variable. Horovod's names in brackets
work too.

| Variable | Default | What it does |
|---|---|---|
"""
_AGENTS_BEGIN, _AGENTS_END = "notebook/lab/tools.py. -->\n", "## From Python\n"
_MAGICS_BEGIN, _MAGICS_END = "magics/commands. -->\n", "## In a cell\n"
_MORE = {
    "cells": "[cells that wait](tasks/some-ranks.md), [debugging](tasks/debug.md)",
    "cluster": "[hosts](tasks/several-hosts.md), [ranks that die](tasks/dead-ranks.md), [other engines](engines.md)",
    "runs": "[metrics](tasks/metrics.md), [does it scale?](tasks/scaling.md)",
    "steering": "[steer a run](tasks/steer.md)",
    "snapshots": "[snapshots](tasks/snapshots.md)",
    "jobs": "[batch systems](tasks/allocation.md)",
    "sharing": "[share a run](tasks/share.md)",
}
"""By group of commands: where docs say more."""
_RINGRUN_HEAD = """# Every option of ringrun

    ringrun -np N [options] program [arguments]

`ringrun --help` shows the same. Options of `horovodrun` have their names.
"""
_API = {
    "cells": ("In a cell or script: ring", "ring_notebook.torch", "ring_notebook.torch.elastic"),
    "python": ("In the notebook's Python: ring_notebook", "ring_notebook", "ring_notebook.errors"),
    "engines": ("On Ray, Dask, Spark and pods", *(f"ring_notebook.{name}" for name in LENDERS)),
}
"""By page: its title, and the modules whose public names it has."""
_GROUPS_OF_NAMES = {
    "Train": "prepare track log log_params knob checkpoint save load only step",
    "Know more of a training": "check counts noise_scale",
    "Optimizers and rates": "clip_grad_norm_ LocalSteps LARS LAMB LinearScalingLR",
    "Ranks": "init is_initialized shutdown rank size local_rank local_size cross_rank cross_size"
    " is_homogeneous barrier",
    "Tensors between ranks": "allreduce allgather allgather_into alltoall broadcast gather reducescatter"
    " scatter send recv isend irecv allgather_object broadcast_object empty process_group",
}
"""By group of the page of ring, in this order: its names. The last group has all others, for scripts of Horovod."""
_OF_HOROVOD = "Horovod's other names"
_GROUPED = "ring_notebook.torch"


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
    """The page of the magics, with their commands and options between its two marks."""
    head, _, rest = MAGICS_PAGE.read_text().partition(_MAGICS_BEGIN)
    commands = [one for magic in MAGICS.values() for one in magic.every()]
    made = ""
    for group in GROUPS:
        made += f"\n## {group.capitalize()}\n\nMore: {_MORE[group]}.\n\n| | |\n|---|---|\n"
        made += "".join(_rows_of(one) for one in commands if one.group == group)
    return f"{head}{_MAGICS_BEGIN}{made}\n{_MAGICS_END}{rest.partition(_MAGICS_END)[2]}"


def _rows_of(command: Command[..., Any]) -> str:
    rows = [(f"**`{command.usage}`**", f"{command.about[0].upper()}{command.about[1:]}")]
    rows += [(f"`{one.shown}`", one.help) for one in command.options]
    return "".join(f"| {left} | {right} |\n" for left, right in ((a.replace("|", "\\|"), b) for a, b in rows))


def agents() -> str:
    """The page about agents, with the tools and conditions between its two marks."""
    head, _, rest = AGENTS_PAGE.read_text().partition(_AGENTS_BEGIN)
    made = "\n| Tool | Needs | What it does |\n|---|---|---|\n"
    for needs in PERMISSIONS:
        for name, tool in TOOLS.items():
            if tool.needs == needs:
                arguments = ", ".join(tool.arguments)
                about = " ".join((inspect.getdoc(tool.method) or "").partition("\n\n")[0].split())
                about = about.partition(" Raises ")[0].replace("``", "`")
                made += f"| `{name}({arguments})` | {needs} | {about} |\n"
    waits = ", ".join(f"`{one}`" for one in CONDITIONS)
    made += f"\nA wait ends with the run, or at one of these, with other names and numbers: {waits}.\n"
    return f"{head}{_AGENTS_BEGIN}{made}\n{_AGENTS_END}{rest.partition(_AGENTS_END)[2]}"


def stub() -> str:
    """The stub of the core, with the members that its enums have now."""
    text = STUB.read_text()
    for name in ("DType", "Device", "ReduceOp"):
        members = "".join(f"    {one.name} = ...\n" for one in getattr(_core, name))
        text = re.sub(rf"(class {name}\(.*:\n)(?:    \w+ = \.\.\.\n)*", rf"\g<1>{members}", text)
    return text


def answers() -> str:
    """The page with the JSON schemas of what tools take and of what they answer."""
    page = "# Tools of agents as JSON\n\nSchemas of the arguments and answers of [the tools](../agents.md#tools).\n"
    kinds: list[type[Answer]] = []
    for name, tool in TOOLS.items():
        page += f"\n## {name}\n\n{tool.about} Answers {tool.answer.__name__}.\n\n{_json(tool.input_schema)}"
        kinds += [tool.answer] * (tool.answer not in kinds)
    for kind in sorted(kinds, key=lambda one: one.__name__):
        page += f"\n## {kind.__name__}\n\n{_json(schema(kind))}"
    return page


def _json(value: dict[str, Any]) -> str:
    return f"```json\n{json.dumps(value, indent=1)}\n```\n"


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
    page = f"# {title}\n"
    for module in modules:
        # Each error stands once, in the module that defines it.
        left_out = [] if module == errors.__name__ else [name for name in vars(errors) if name[:1].isupper()]
        if module == _GROUPED:
            for heading, names in _GROUPS_OF_NAMES.items():
                page += f"\n## {heading}\n\n{_rst(''.join(map(_described, names.split())))}"
                left_out += names.split()
            page += f"\n## {_OF_HOROVOD}\n\n"
        page += _rst(f"\n.. automodule:: {module}\n   :exclude-members: {', '.join(left_out)}\n")
    return page


def _described(name: str) -> str:
    kind = "class" if isinstance(getattr(importlib.import_module(_GROUPED), name), type) else "function"
    return f"\n.. auto{kind}:: {_GROUPED}.{name}\n"


def _rst(text: str) -> str:
    return f"```{{eval-rst}}{text}```\n"


def write() -> None:
    """Write all of it; a page that has not changed stays as it is, so that Sphinx does not read it again."""
    pages = {SETTINGS: settings(), MAGICS_PAGE: magics(), SITE / "ringrun.md": ringrun()}
    pages |= {AGENTS_PAGE: agents(), SITE / "agents.md": answers(), STUB: stub()}
    pages |= {SITE / f"{name}.md": _api(*content) for name, content in _API.items()}
    SITE.mkdir(exist_ok=True)
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write()
