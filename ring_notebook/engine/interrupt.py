"""SIGINT during a run: it ends the cell, but never the report of how the cell ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread, get_ident
from time import clock_gettime, monotonic, pthread_getcpuclockid
from types import FrameType

from ring_notebook.core import foreign_interrupts
from ring_notebook.rank.named_interrupt import tell_execution

_BETWEEN_LOOKS = 0.5  # seconds
_WAITING = 0.001  # seconds of processor time between two checks; a thread that uses less is waiting
_PROBE = signal.SIGURG  # otherwise unused: wakes the main thread, whose handler notes that it handles signals
# A process that the cell forks would otherwise report its signals to this one's watcher.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class Interruptible:
    """A context in which SIGINT raises KeyboardInterrupt in the function that `call` calls, and nowhere else.

    A signal before the call is raised in it; a signal after it is ignored. Python handles a signal when its main thread
    is back in the interpreter. C++ code that waits without checking signals delays that; `unheard` reports it, and an
    exception of the call then counts as the interrupt. A system call that began just after Python had checked for
    signals, such as that of a long sleep, is interrupted again. ``name``: the target in interrupts from the kernel.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._armed = False
        self._pending = False
        self._raised = False
        self._dropped = False
        self._cut_off = False
        self._looked = False  # the main thread has handled signals
        self._ended = Event()
        self._thread = get_ident()
        self._process = os.getpid()
        self.unheard: float | None = None
        """Seconds since an interrupt for which the main thread has waited in code that does not check signals.

        None before the first interrupt; 0.0 while the thread checks signals, or computes.
        """

    def __enter__(self) -> Interruptible:
        self._before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, _PROBE)]
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(_PROBE, self._on_probe)
        self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        come, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        self._descriptor_before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        Thread(target=self._watch, args=(come,), name="ring-interrupt", daemon=True).start()
        tell_execution(self._name)
        return self

    def __exit__(self, *_: object) -> None:
        tell_execution("")
        self._ended.set()
        signal.set_wakeup_fd(self._descriptor_before)
        self._signals.close()
        sys.unraisablehook = self._unraisable_before
        for number, handler in self._before:
            signal.signal(number, handler)

    def _watch(self, come: socket.socket) -> None:
        """Note each signal when it arrives, whatever the main thread does."""
        with come:
            while numbers := come.recv(64):
                if self._descriptor_before >= 0:  # of an event loop, which does not run now
                    with suppress(OSError):
                        os.write(self._descriptor_before, numbers)
                if signal.SIGINT in numbers and self._armed:
                    foreign_interrupts.interrupt()
                    self._follow()

    def _follow(self) -> None:
        """Until the call has ended, check whether the main thread handles signals."""
        clock = pthread_getcpuclockid(self._thread)
        looked, used = monotonic(), clock_gettime(clock)
        while self._armed:
            self._looked = False
            signal.pthread_kill(self._thread, signal.SIGINT if self._dropped else _PROBE)
            if self._ended.wait(_BETWEEN_LOOKS):
                break
            now, used_before, used = monotonic(), used, clock_gettime(clock)
            if self._looked or used - used_before > _WAITING:
                looked = now
            self._cut_off |= looked < now
            self.unheard = now - looked

    def call(self, body: Callable[[], None]) -> BaseException | None:
        """Call ``body`` and return its exception, or None."""
        try:
            try:
                self._ended.clear()
                self._armed = True
                if self._pending:
                    raise KeyboardInterrupt
                body()
            finally:
                self._armed = False
        except BaseException as error:
            # Once more: another signal may have arrived just before the line above.
            self._armed = False
            if not isinstance(error, KeyboardInterrupt) and (self._cut_off or self._is_told_in(error)):
                return KeyboardInterrupt().with_traceback(error.__traceback__)
            return error
        finally:
            self._ended.set()
        return None

    def _is_told_in(self, error: BaseException) -> bool:
        """Whether C++ code has turned the KeyboardInterrupt into an error of its own, which contains its text."""
        return self._raised and isinstance(error, RuntimeError) and KeyboardInterrupt.__name__ in str(error)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self._looked, self._dropped, self.unheard = True, False, 0.0
        if self._armed:
            self._raised = True
            raise KeyboardInterrupt
        self._pending = True

    def _on_probe(self, _signum: int, _frame: FrameType | None) -> None:
        self._looked = True

    def _on_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        """Interrupt again where Python drops exceptions, such as around a fork and in ``__del__``."""
        ours = self._armed and get_ident() == self._thread and os.getpid() == self._process
        if not ours or not isinstance(dropped.exc_value, KeyboardInterrupt):
            self._unraisable_before(dropped)
            return
        self._dropped = True
