"""The trees of sources, each parsed once for all tests that read them."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of ``text``; nobody changes it."""
    return ast.parse(text)
