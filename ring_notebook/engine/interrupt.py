"""SIGINT during a run: it ends the cell, and never the report of how the cell ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread, get_ident
from types import FrameType, TracebackType

__all__ = ["Interruptible"]

_PATIENCE = 0.5  # seconds until code counts as blind to signals
# In a process that the cell forks: what signals it would else be told to the watcher of this one.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class Interruptible:
    """While the block runs, SIGINT raises KeyboardInterrupt in what `call` calls and nowhere else.

    A signal before the call is raised in it; a signal after it is ignored. Python handles a signal when its main thread
    is back in the interpreter. Where it is not soon, because C++ waits there without looking at signals,
    ``end_waits`` is called in another thread, and what the call raises then counts as the interrupt. A system call that
    began just after Python had looked for signals, such as that of a long sleep, is interrupted again.
    """

    def __init__(self, end_waits: Callable[[], None] | None = None) -> None:
        self._armed = False
        self._pending = False
        self._end_waits = end_waits
        self._handled = Event()
        self._cut_off = False
        self._raised = False
        self._repeated = False
        self._thread = get_ident()
        self._process = os.getpid()

    def __enter__(self) -> Interruptible:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        self._unraisable_before, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        if self._end_waits is not None:
            come, self._signals = socket.socketpair()
            self._signals.setblocking(False)
            self._descriptor_before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
            Thread(target=self._watch, args=(come, self._end_waits), name="ring-interrupt", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._end_waits is not None:
            signal.set_wakeup_fd(self._descriptor_before)
            self._signals.close()
        sys.unraisablehook = self._unraisable_before
        signal.signal(signal.SIGINT, self._before)

    def _watch(self, come: socket.socket, end_waits: Callable[[], None]) -> None:
        """Look at each signal when it arrives, whatever the main thread does."""
        with come:
            while numbers := come.recv(64):
                if self._descriptor_before >= 0:  # an event loop's, which runs no loop now
                    with suppress(OSError):
                        os.write(self._descriptor_before, numbers)
                if signal.SIGINT in numbers and self._armed and not self._handled.wait(_PATIENCE):
                    self._cut_off = True
                    end_waits()
                    self._repeat()

    def _repeat(self) -> None:
        """Interrupt the system call that the main thread may be in, until it has handled the signal."""
        while self._armed and not self._handled.wait(_PATIENCE):
            self._repeated = True
            signal.pthread_kill(self._thread, signal.SIGINT)

    def call(self, body: Callable[[], None]) -> BaseException | None:
        """Call ``body`` and return what it raised."""
        try:
            try:
                self._armed = True
                if self._pending:
                    raise KeyboardInterrupt
                body()
            finally:
                self._armed = False
        except BaseException as error:
            # Again: another signal may have arrived just before the line above.
            self._armed = False
            if not isinstance(error, KeyboardInterrupt) and (self._cut_off or self._is_told_in(error)):
                return KeyboardInterrupt().with_traceback(error.__traceback__)
            return error
        return None

    def _is_told_in(self, error: BaseException) -> bool:
        """Whether C++ has met the KeyboardInterrupt, and raised an error of its own with its words."""
        return self._raised and isinstance(error, RuntimeError) and KeyboardInterrupt.__name__ in str(error)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        repeated, self._repeated = self._repeated, False
        if repeated and self._handled.is_set():  # the first one was handled meanwhile
            return
        self._handled.set()
        if self._armed:
            self._raised = True
            raise KeyboardInterrupt
        self._pending = True

    def _on_unraisable(self, dropped: sys.UnraisableHookArgs) -> None:
        """Interrupt again where Python drops what is raised, such as around a fork and in ``__del__``."""
        ours = self._armed and get_ident() == self._thread and os.getpid() == self._process
        if not ours or not isinstance(dropped.exc_value, KeyboardInterrupt):
            self._unraisable_before(dropped)
            return
        self._handled.clear()
        Thread(target=self._repeat, name="ring-interrupt-again", daemon=True).start()
