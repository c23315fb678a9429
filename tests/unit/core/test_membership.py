"""How ranks of several hosts agree on the number of the next generation."""

from __future__ import annotations

import pytest

from ring_notebook.config import config
from ring_notebook.core.membership import _agree_over_tcp
from ring_notebook.core.native import core
from ring_notebook.errors import CollectiveTimeout


@pytest.mark.parametrize(("own", "missing"), [(0, "rank 1, rank 2"), (1, "rank 0")])
def test_ranks_that_do_not_come_are_named(own: int, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_TIMEOUT", "0.2")
    config.cache_clear()
    try:
        with pytest.raises(
            CollectiveTimeout, match=rf"^rank {own} waited 0\.2 s for {missing} to join the next generation$"
        ):
            _agree_over_tcp(core.TcpLink(3), [0, 1, 2], own, 7)
    finally:
        monkeypatch.undo()
        config.cache_clear()
