"""Waits beside collectives of ours: counted, recorded, and seen from another thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Thread

import pytest

from ring_notebook.core import metrics, other_waits
from ring_notebook.core.other_waits import ForeignWait


@pytest.fixture(autouse=True)
def _counters() -> Iterator[None]:
    other_waits.begin()
    yield
    other_waits.begin()


def test_a_message_is_a_bubble_until_it_comes_and_moves_then() -> None:
    def wait() -> float:
        assert (other_waits.now() or ("", 0))[0] == "receive from rank 0, tag 3"
        time.sleep(0.02)
        return 0.015

    other_waits.keep()
    other_waits.message(wait, lambda: "receive from rank 0, tag 3")
    assert other_waits.now() is None
    assert other_waits.seconds() == (0.015, 0.0, 0.0)
    bubble, moving = other_waits.take()
    assert (bubble.phase, moving.phase, bubble.end - bubble.begin) == ("bubble", "moving", 15_000_000)
    assert moving.begin == bubble.end < moving.end
    assert other_waits.take() == []


def test_waits_for_data_are_kept_where_asked_for() -> None:
    for keeps in (False, True):
        if keeps:
            other_waits.keep()
        assert list(metrics.track([1, 2])) == [1, 2]
        assert [(one.phase, one.begin <= one.end) for one in other_waits.take()] == [("data", True)] * 2 * keeps


def test_an_operation_of_another_backend_counts_once() -> None:
    other_waits.keep()
    with ForeignWait("dist.recv", is_message=True), ForeignWait("dist.all_reduce"):
        time.sleep(0.01)
    counted = other_waits.seconds()
    assert counted.messages == 0.0 < 0.01 <= counted.foreign == counted.foreign_messages
    with ForeignWait("dist.all_reduce"):
        pass
    assert [(one.phase, one.what) for one in other_waits.take()] == [
        ("bubble", "dist.recv"),
        ("waiting", "dist.all_reduce"),
    ]


def test_a_wait_that_fails_is_over() -> None:
    def fail() -> float:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        other_waits.message(fail, lambda: "send to rank 1, tag 0")
    with pytest.raises(ValueError, match="boom"), ForeignWait("dist.barrier"):
        fail()
    assert other_waits.now() is None


def test_other_threads_do_not_count() -> None:
    def waits() -> None:
        other_waits.message(lambda: 1.0, lambda: "receive from any rank, tag 0")
        with ForeignWait("dist.barrier"):
            assert other_waits.now() is None

    thread = Thread(target=waits)
    thread.start()
    thread.join()
    assert other_waits.seconds() == (0.0, 0.0, 0.0)
