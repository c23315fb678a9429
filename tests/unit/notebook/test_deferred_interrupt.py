"""An interrupt waits until a block is complete."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ring_notebook.notebook.deferred_interrupt import DeferredInterrupt


def test_it_waits_for_the_end_of_the_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    with DeferredInterrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        done = sum(range(1000))
    assert interrupt.came
    assert done == 499_500
    assert signal.getsignal(signal.SIGINT) is before


def test_without_one_nothing_has_come_and_the_next_one_is_raised() -> None:
    with DeferredInterrupt() as interrupt:
        pass
    assert not interrupt.came
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_it_is_restored_when_the_block_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), DeferredInterrupt():
        _ = 1 / 0
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone() -> None:
    seen = []

    def use() -> None:
        with DeferredInterrupt() as interrupt:
            seen.append((interrupt.came, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [(False, signal.getsignal(signal.SIGINT))]
