"""Any loop that one process can run trains alike on ranks: random loops in float64, compared to 1e-9."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, seed
from hypothesis import settings as example_settings

import ring_notebook.torch as ring
from ranks.loops.loop_source import Loop, loops, source
from ring_notebook.core import world

EXAMPLES = int(os.environ.get("LOOPS", "25"))
"""How many are tried; LOOPS_SEED chooses others. With LOOPS_ALL=FILE none ends the test, and FILE has all bad ones."""
FAR = 1e-9
FAR_FOR_SEARCHES = 1e-4
"""LBFGS divides by differences of gradients: it multiplies rounding, on one process too."""
_tried = {"loops": 0, "not by one process": 0, "bad": 0}


def _tell(text: str) -> None:
    """For a count of many loops: LOOPS_ALL is the file to which it goes."""
    with open(os.environ["LOOPS_ALL"], "a") as file:
        file.write(text + "\n")


def outcome(train: Callable[..., Any], distance: Callable[..., float], alone: Any, far: float) -> str:
    """What is wrong with a training on the ranks, as this rank sees it; empty where nothing is."""
    try:
        apart = distance(train(ring, ring.rank(), ring.size()), alone)
    except Exception as error:
        world.fail(error)
        return f"{type(error).__name__}: {error}"
    return "" if apart < far else f"{apart:.2g} from one process"


def judge(loop: Loop, settings: Callable[..., None], size: int) -> str:
    """What is wrong with ``loop``, the same text on all ranks."""
    settings(overlap=loop.overlap)
    scope: dict[str, Any] = {"__name__": "loop"}
    exec(compile(source(loop), "loop.py", "exec"), scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            alone = scope["train"](None, 0, size)
        except Exception as error:
            note(f"one process: {error!r}")
            return "alone"
        ring.init()
        found = outcome(
            scope["train"], scope["distance"], alone, FAR_FOR_SEARCHES if "LBFGS" in loop.optimizers else FAR
        )
    ring.shutdown()
    ring.init()
    rows = ring.allgather_object(found)
    ring.shutdown()
    return "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(rows) if one)


@pytest.mark.sizes(2, slow=(3,))
@pytest.mark.timeout(120 + 3 * EXAMPLES)
def test_random_loops(settings: Callable[..., None], size: int, rank: int) -> None:
    @seed(int(os.environ.get("LOOPS_SEED", "11")))
    @example_settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate] if os.environ.get("LOOPS_ALL") else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(loops())
    def trains_alike(loop: Loop) -> None:
        found = judge(loop, settings, size)
        assume(found != "alone")
        _tried["loops"] += 1
        if found and os.environ.get("LOOPS_ALL"):  # count, go on
            _tried["bad"] += 1
            if rank == 0:
                _tell(f"BAD {loop}\n    {found[:900]}")
            return
        if found:
            note(source(loop))
        assert not found, found

    trains_alike()
    if os.environ.get("LOOPS_ALL") and rank == 0:
        _tell(str(_tried))
        assert not _tried["bad"]
