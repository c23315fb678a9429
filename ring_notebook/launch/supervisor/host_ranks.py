"""The interface through which a supervisor starts, signals and watches the ranks of one host, wherever that is."""

from __future__ import annotations

import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ring_notebook.rank.rank_status import RankStatus
from ring_notebook.verdict import RankFailure

__all__ = ["Assignment", "HostRanks"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the ranks of one host have to run.

    ``environment`` is that of the job; each rank gets its own variables besides. ``master`` is what `rank_variables`
    takes. ``min_np`` is not 0 in an elastic job. ``tagged`` has what ranks print carry their numbers.
    """

    program: list[str]
    environment: dict[str, str]
    ranks: list[int]
    size: int
    master: str
    min_np: int = 0
    tagged: bool = False


class HostRanks(ABC):
    """The ranks of one host. ``watch`` comes first, then one ``start`` for each rank, then ``carry_output``."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)

    def watch(self, selector: selectors.BaseSelector, on_exit: Callable[[RankFailure], None]) -> None:
        """Have what happens here noticed by ``selector``, whose keys carry functions to call.

        ``on_exit`` takes how a rank has exited; with code 0 it has ended well, as far as is known.
        """
        self._selector = selector
        self._on_exit = on_exit

    @abstractmethod
    def start(self, rank: int, channel: socket.socket) -> None:
        """Start the program as ``rank``, with its end of the socket between rank and supervisor.

        Raises NoProgramError when the program is the reason that it cannot, OSError else.
        """

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Called at least twice a second while ranks run."""

    @abstractmethod
    def carry_output(self) -> None:
        """All ranks have been started: pass on what they print."""

    @abstractmethod
    def send(self, signum: int) -> None:
        """Send a signal to all ranks that still run."""

    @abstractmethod
    def status(self, rank: int) -> RankStatus:
        """What ``rank`` has reported so far."""

    @abstractmethod
    def failure(self, rank: int, code: int) -> RankFailure:
        """The failure of ``rank``, which has exited with ``code``, or aborts the job with it now."""

    @abstractmethod
    def end_children(self) -> None:
        """All ranks have exited, some because they had to: end what they have left behind."""

    @abstractmethod
    def close(self) -> None:
        """All ranks have exited: return when what they printed is written."""
