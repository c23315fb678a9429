"""An interrupt ends a cell as KeyboardInterrupt, also where C++ has made an error of another type of it."""

from __future__ import annotations

import os
import signal
import time
from _thread import interrupt_main
from threading import Timer

from ring_notebook.engine.interrupt import Interruptible


def interrupt_in_cpp() -> None:
    """As torch's pickler: what Python raises below it comes out as text."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:
        raise RuntimeError(f"Cannot extract tensors from value: {error!r}") from None


def fail() -> None:
    raise RuntimeError("the optimizer of KeyboardInterrupt")


def test_an_interrupt_that_cpp_has_wrapped() -> None:
    with Interruptible() as interruptible:
        assert isinstance(interruptible.call(interrupt_in_cpp), KeyboardInterrupt)


def test_an_error_that_no_interrupt_has_made() -> None:
    with Interruptible() as interruptible:
        assert isinstance(interruptible.call(fail), RuntimeError)


def test_a_signal_that_python_notes_just_before_a_system_call_begins() -> None:
    """Nothing wakes the call then: Python looks at signals before and after it."""
    notes = Timer(0.2, interrupt_main)
    notes.start()
    began = time.monotonic()
    with Interruptible(lambda: None) as interruptible:
        assert isinstance(interruptible.call(lambda: time.sleep(60)), KeyboardInterrupt)
    notes.join()
    assert time.monotonic() - began < 50


def test_an_interrupt_that_python_drops() -> None:
    """As in a hook around a fork, or in a finalizer."""

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)

    def drops() -> None:
        Finalized()
        time.sleep(60)

    began = time.monotonic()
    with Interruptible(lambda: None) as interruptible:
        assert isinstance(interruptible.call(drops), KeyboardInterrupt)
    assert time.monotonic() - began < 50
