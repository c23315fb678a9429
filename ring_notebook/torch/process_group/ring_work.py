"""The handle that torch.distributed gets for an operation of the core."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ring_notebook.core import other_waits
from ring_notebook.core.work import Work
from ring_notebook.errors import RingError
from ring_notebook.torch_private import private

_NO_TIMEOUT = timedelta(0)
_RUN_BACKWARD = (private("run_backward") or torch.autograd.backward).__code__
_at_end_of_backward = private("at_end_of_backward")
_current_graph_task = private("current_graph_task")
_current_node = private("current_node")


class BaseWork(c10d.Work):
    """The methods of a handle for torch.distributed, by the ``wait`` and ``is_completed`` of a subclass."""

    _errors: type[Exception] = RingError
    """Errors of the operation that `exception` returns."""

    _result: list[Any]

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_success(self) -> bool:
        """Whether the operation has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """The error of the operation, once it has completed; None without one."""
        try:
            self.wait()
        except self._errors as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        """The tensors that the operation has written."""
        self.wait()
        return self._result


class RingWork(BaseWork):
    """One or several operations under way, and a function to call when they have completed.

    `wait`, `get_future` and `exception` raise or return the core's CollectiveMismatch, CollectiveAborted and
    CollectiveTimeout unchanged, on any thread.
    """

    def __init__(
        self,
        works: Iterable[Work] = (),
        finish: Callable[[], object] | None = None,
        result: Sequence[Any] = (),
        source: Callable[[], int] | None = None,
    ) -> None:
        """``finish`` runs once, when all ``works`` have completed; `result` and futures return ``result``."""
        super().__init__()
        self._works = tuple(works)
        self._finish = finish
        self._result = list(result)
        self._source = source
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the operation has completed; raise its error, or CollectiveTimeout after ``timeout``."""
        other_waits.ours()
        seconds = timeout.total_seconds() if timeout is not None and timeout > _NO_TIMEOUT else None
        for work in self._works:
            work.wait(seconds)
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.done() for work in self._works)

    def source_rank(self) -> int:
        """The group rank that a received tensor came from; -1 for other operations."""
        self.wait()
        return -1 if self._source is None else self._source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors. Raises the operation's error.

        The future is completed when it is returned, because C++ waits for futures without checking signals, and keeps
        only the text of an error. An exception is DistributedDataParallel, which asks for a future during backward and
        waits for it afterwards: its future completes, or raises from ``backward()``, at the end of the pass.
        """
        if self._source is not None:
            raise RingError("a receive has no future; call wait(), which an interrupt and a failing rank can end")
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            self.wait()
            # DistributedDataParallel reads the first tensor of the result without a check.
            future.set_result(self._result or [torch.empty(0)])

        if not self.is_completed() and _at_end_of_backward is not None and _is_asked_by_reducer():
            _at_end_of_backward(complete)
        else:
            complete()
        return future


def in_backward() -> bool:
    """Whether a backward pass runs on this thread; False if this torch does not tell."""
    return _current_graph_task is not None and _current_graph_task() != -1


def _is_asked_by_reducer() -> bool:
    """Whether the reducer of DistributedDataParallel, which is C++ in the backward pass, asks for a future.

    A hook in Python may ask too, and wait for it at once. If the reducer asks, the Python frame below is the call of
    backward, or there is none on a thread of autograd. With a static graph the reducer asks at the end of the first
    pass, and waits there: what is queued for the end then runs too late.
    """
    asking = sys._getframe(1).f_back
    in_node = in_backward() and _current_node is not None and _current_node() is not None
    return in_node and (asking is None or asking.f_code is _RUN_BACKWARD)


class CompletedWork(RingWork):
    """The handle of any completed operation whose tensors nobody needs."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True
