"""Syntax trees of sources, each parsed once for all tests that read it."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of ``text``; callers must not change it."""
    return ast.parse(text)
