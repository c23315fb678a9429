"""An interrupt ends a cell as KeyboardInterrupt, also where C++ has made an error of another type of it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import time
from _thread import interrupt_main
from threading import Thread, Timer

import pytest

from harness.waiting import until
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
    with Interruptible() as interruptible:
        assert isinstance(interruptible.call(lambda: time.sleep(3600)), KeyboardInterrupt)
    notes.join()


def test_an_interrupt_that_python_drops() -> None:
    """As in a hook around a fork, or in a finalizer."""

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)

    def drops() -> None:
        Finalized()
        time.sleep(3600)

    with Interruptible() as interruptible:
        assert isinstance(interruptible.call(drops), KeyboardInterrupt)


def test_a_wait_in_cpp_that_looks_at_no_signal() -> None:
    """It is known for how long; also of one behind ``finally``, when the interrupt itself has been raised."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)

    def release() -> None:
        until(lambda: (interruptible.unheard or 0.0) > 1.0)
        libc.pthread_mutex_unlock(mutex)

    def waits() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            assert interruptible.unheard == 0.0
            releases.start()
            libc.pthread_mutex_lock(mutex)

    releases = Thread(target=release)
    with Interruptible() as interruptible:
        assert interruptible.unheard is None
        assert isinstance(interruptible.call(waits), KeyboardInterrupt)
    releases.join()


@pytest.mark.slow
def test_a_computation_in_cpp_that_looks_at_no_signal() -> None:
    """It waits for nobody, and ends by itself."""
    seen: list[float] = []

    def watch() -> None:
        while interruptible._armed:
            seen.append(interruptible.unheard or 0.0)
            time.sleep(0.01)

    def computes() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            watches.start()
            hashlib.pbkdf2_hmac("sha512", b"text", b"salt", 3_000_000)

    watches = Thread(target=watch)
    with Interruptible() as interruptible:
        assert isinstance(interruptible.call(computes), KeyboardInterrupt)
    watches.join()
    assert len(seen) > 50
    assert max(seen) == 0.0
