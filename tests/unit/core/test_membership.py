"""How ranks of several hosts agree on the number of the next generation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ring_notebook.core.membership import _agree_over_tcp
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveTimeout


@pytest.mark.parametrize(("own", "missing"), [(0, "rank 1, rank 2"), (1, "rank 0")])
def test_ranks_that_do_not_come_are_named(own: int, missing: str, settings: Callable[..., None]) -> None:
    settings(timeout=0.2)
    words = rf"^rank {own} waited 0\.2 s for {missing} to join the next generation$"
    with pytest.raises(CollectiveTimeout, match=words):
        _agree_over_tcp(core.TcpLink(3), [0, 1, 2], own, 7)
