"""Writes docs/settings.md from the attribute docstrings of `ring_notebook.config.Config`.

``python docs/settings_page.py``. A test compares the page with the source.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

from ring_notebook import config

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).with_name("settings.md")
_HEAD = """# Settings

<!-- Written by `python docs/settings_page.py` from ring_notebook/config.py. -->

Environment variables, read once by each process. Set them before `%ring start`, `ringrun` or `ring_notebook.run`, which
pass them on to the ranks. A value that cannot be read is an error that names the variable. Horovod's names in brackets
work too.

| Variable | Default | What it does |
|---|---|---|
"""


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


def render() -> str:
    """The page. Raises KeyError for a setting without a docstring."""
    docs = _docstrings()
    rows = []
    for field in fields(config.Config):
        name, _, text = re.sub(r"\s+", " ", docs[field.name]).partition(": ")
        variable, _, alias = name.partition(" (")
        default = "empty" if field.default == "" else f"`{field.default}`"
        text = text.replace("``", "`").replace("|", "\\|")
        named = f"`{variable}` (`{alias[:-1]}`)" if alias else f"`{variable}`"
        rows.append(f"| {named} | {default} | {text[0].upper()}{text[1:]} |\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render())
