"""Engines that load a face for numpy instead of PyTorch, which halves their start, for tests without tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ring_notebook import frameworks
from ring_notebook.config import config

__all__ = ["installed", "numpy_framework"]

_FACE = Path(__file__).parents[1] / "frameworks"


@contextmanager
def numpy_framework(site: Path) -> Iterator[None]:
    """In the block, numpy is the default framework of this process and of those that it starts.

    The package of the framework is in the folder ``site``; see `installed`.
    """
    with pytest.MonkeyPatch.context() as patch, installed(site):
        patch.setenv("RING_FRAMEWORK", "numpy")
        _forget()
        yield
    _forget()


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """In the block, the package is installed in the folder ``site``, as pip does, for this process and its children."""
    if str(site) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        yield
        return
    about = site / "numpy_face-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy-face\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ring_notebook.frameworks]\nnumpy = numpy_entry:NUMPY\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), str(_FACE), os.environ.get("PYTHONPATH")])))
        for folder in (site, _FACE):
            patch.syspath_prepend(str(folder))
        _forget()
        yield
    _forget()


def _forget() -> None:
    config.cache_clear()
    frameworks.frameworks.cache_clear()
