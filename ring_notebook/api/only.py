"""`with only(0):` a block that only some ranks execute, while the others wait at its end."""

from __future__ import annotations

import operator
import sys
from types import FrameType, TracebackType
from typing import Any

from ring_notebook.core import world


class _SkippedError(BaseException):
    """Raised at the start of the block on ranks that do not execute it."""


class only:  # noqa: N801 - read as part of a statement, like contextlib.suppress
    """A block for some ranks: ``with ring.only(0):``, ``with ring.only(0, 2):`` or ``with ring.only(each_host=True):``.

    All ranks must reach it. The named ranks execute it. In it the world has only these ranks, numbered from 0, and
    collectives are among them. With ``each_host`` the first rank of each host executes it, each in a world of its own.
    The others wait at its end, for all hosts. It works only in a ``with`` statement.

    Raises ValueError on every rank for ranks that do not exist, and CollectiveAborted on the waiting ranks when a rank
    of the block fails.
    """

    def __init__(self, *ranks: int, each_host: bool = False) -> None:
        self.ranks = tuple(sorted(operator.index(rank) for rank in ranks))
        self._each_host = each_host
        self._name = "only(each_host=True)" if each_host else f"only{self.ranks}"
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        current = world.current()
        if self._each_host and self.ranks:
            raise ValueError(f"rank {current.rank}: only() takes ranks or each_host=True, got both: {self.ranks}")
        if self._each_host:
            self.ranks = tuple(current.first_ranks)
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"rank {current.rank}: only() takes at least one rank, and each once, got {self.ranks}")
        if any(not 0 <= rank < current.size for rank in self.ranks):
            raise ValueError(
                f"rank {current.rank}: only{self.ranks}: expected ranks within 0..{current.size - 1}; "
                "they are numbered as outside of the block"
            )
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == "contextlib":
            raise TypeError(f"rank {current.rank}: only() is for a `with` statement, whose block it can skip")
        if not world.narrow(self.ranks, apart=self._each_host):
            self._skip(frame)

    def _skip(self, frame: FrameType) -> None:
        """Make the next instruction of ``frame``, the first one of the block, raise."""

        def raise_skipped(*_: Any) -> None:
            raise _SkippedError

        # Python has no other way to skip a block: it calls a trace function between two instructions.
        self._before = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes
        self._frame = frame
        sys.settrace(lambda *_: None)
        frame.f_trace, frame.f_trace_opcodes = raise_skipped, True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if self._frame is not None:
            frame, self._frame = self._frame, None
            sys.settrace(self._before[0])
            frame.f_trace, frame.f_trace_opcodes = self._before[1:]
        else:
            world.widen()
        if kind is not None and kind is not _SkippedError:
            return False
        world.current().communicator.barrier(name=f"end of {self._name}").wait()
        return True
