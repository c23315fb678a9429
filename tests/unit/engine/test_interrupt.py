"""An interrupt ends a cell as KeyboardInterrupt, also where C++ has made an error of another type of it."""

from __future__ import annotations

import os
import signal

from ring_notebook.engine.debugging.interrupt import Interruptible


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
