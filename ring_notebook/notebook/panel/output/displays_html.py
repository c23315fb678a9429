"""Displays of ranks as HTML and as text, for places where they cannot be outputs of a notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

from ring_notebook.notebook.record.displays import Displayed
from ring_notebook.notebook.style import GREY, rank_color, rank_list

__all__ = ["html", "label", "text"]

_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def label(one: Displayed) -> str:
    """The label with the ranks that show it, for a page."""
    color = rank_color(one.ranks[0]) if len(one.ranks) == 1 else GREY
    return f"<span style='color:{color};font:12px monospace'>[{rank_list(one.ranks)}]</span>"


def html(displays: Iterable[Displayed]) -> str:
    """All of them for a page."""
    return "".join(f"<div>{label(one)}<div>{_body(one)}</div></div>" for one in displays)


def text(displays: Iterable[Displayed]) -> str:
    """All of them for a terminal."""
    return "".join(f"[{rank_list(one.ranks)}] {_plain(one)}\n" for one in displays)


def _body(one: Displayed) -> str:
    """The richest form that any page shows without a renderer."""
    for mime in _PICTURES:
        if mime in one.data:
            return _image(one, mime, one.data[mime])
    if "image/svg+xml" in one.data:
        return _image(one, "image/svg+xml", base64.b64encode(one.data["image/svg+xml"].encode()).decode())
    if "text/html" in one.data:
        return str(one.data["text/html"])
    return f"<pre>{escape(_plain(one))}</pre>"


def _image(one: Displayed, mime: str, data: str) -> str:
    about = one.metadata.get(mime, {})
    size = "".join(f" {name}='{int(about[name])}'" for name in ("width", "height") if name in about)
    return f"<img alt='{escape(_plain(one), quote=True)}'{size} src='data:{mime};base64,{data.strip()}'>"


def _plain(one: Displayed) -> str:
    return str(one.data.get("text/plain") or ", ".join(one.data))
