"""A checkpoint that threads of all ranks write while the training continues.

The threads call no collectives, because the order of these belongs to the training. Each thread writes to a key-value
store how its part ended. Rank 0's thread polls there until it has all, then completes the checkpoint or reports what
failed.
"""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.errors import RingError
from ring_notebook.text.error_text import cause_text

_SHORTEST, _LONGEST = 0.005, 0.25  # seconds between two looks at the store
_BETWEEN_BEATS = 1.0  # seconds
_MOST_CAUSES = 20
_AFTER_ABORT = 10.0  # seconds to wait without progress after a failure of ranks: one may be dead


@dataclass(frozen=True)
class Part:
    """A rank's part: ``write`` writes it and returns a result for ``finish``; ``taken`` counts tensors so far."""

    write: Callable[[], Any]
    taken: Callable[[], int]


class BackgroundSave:
    """One checkpoint being written; rank 0 calls ``finish`` with the results of all ranks.

    If it cannot be completed, rank 0 calls ``failed`` with the reason, and prints the result on standard error.
    ``number`` is equal on all ranks, and different for each checkpoint in ``store``.
    """

    def __init__(
        self,
        number: int,
        store: Any,
        part: Part,
        finish: Callable[[list[Any]], None],
        failed: Callable[[str], str],
    ) -> None:
        self._number, self._store, self._part = number, store, part
        self._finish, self._failed = finish, failed
        self._generation = world.current()
        self._rank, self._size = self._generation.rank, self._generation.size
        self._has_written = Event()
        self._growth, self._is_told = _Growth(part.taken()), False
        self.failure = ""
        """On rank 0: why the checkpoint failed."""
        # Not daemons: a script that ends waits for its last checkpoint, within the limits below.
        self._thread = Thread(target=self._run, name="ring-checkpoint")
        self._thread.start()

    def is_running(self) -> bool:
        """Whether this rank's thread is busy; reports once if the disk makes no progress."""
        is_alive, limit = self._thread.is_alive(), config().checkpoint_timeout
        if is_alive and self.is_in_part() and not self._growth.goes_on(self._part.taken(), limit) and not self._is_told:
            self._is_told = True
            tell(
                f"rank {self._rank}: the disk has taken nothing of a checkpoint for {limit:g} s; training continues, "
                "and the next checkpoint begins when it does"
            )
        return is_alive

    def is_in_part(self) -> bool:
        """Whether this rank still writes its own part."""
        return not self._has_written.is_set()

    def join(self) -> bool:
        """Wait for this rank's thread, as long as its part grows; returns whether the thread has ended."""
        growth = _Growth(self._part.taken())
        while self.is_running():
            # Rank 0's thread also waits for other ranks' parts, with a limit of its own.
            if self.is_in_part() and not growth.goes_on(self._part.taken(), config().checkpoint_timeout):
                return False
            self._thread.join(_LONGEST)
        return True

    def _key(self, rank: int, what: str = "part") -> str:
        return f"{self._number} {what} {rank}"

    def _run(self) -> None:
        beats = Thread(target=self._beat, name="ring-checkpoint-beats", daemon=True)
        beats.start()
        part, reason = None, ""
        try:
            part = self._part.write()
        except Exception as error:  # of the disk, the network or the storage
            reason = why_not_written(error)
        self._has_written.set()
        try:
            self._store.set(self._key(self._rank), zlib.compress(pickle.dumps((part, reason))))
            if self._rank == 0:
                self._complete()
        except Exception as error:  # the store's host is gone
            self._give_up(f"rank {self._rank}: {cause_text(error)}")

    def _beat(self) -> None:
        """Report to rank 0 that this rank's part grows."""
        told = -1
        while not self._has_written.wait(_BETWEEN_BEATS):
            if (taken := self._part.taken()) != told:
                told = taken
                try:
                    self._store.set(self._key(self._rank, "beat"), str(taken))
                except Exception:  # `_run` gets the same error
                    return

    def _complete(self) -> None:
        parts, reasons = self._parts()
        if not reasons:
            try:
                self._finish(parts)
            except Exception as error:
                text = str(error) if isinstance(error, RingError) else why_not_written(error)
                reasons.append(text if text.startswith("rank ") else f"rank 0: {text}")
        if reasons:
            self._give_up("; ".join(reasons))

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        if self._rank == 0:
            try:
                reason = self._failed(reason)
            finally:  # even if the storage does not answer
                tell(reason)

    def _parts(self) -> tuple[list[Any], list[str]]:
        """The parts of all ranks, and reasons of failures. Waits while any part grows."""
        lacking, growth, pause = list(range(self._size)), _Growth(()), _SHORTEST
        found: dict[int, tuple[Any, str]] = {}
        while True:
            for rank in [one for one in lacking if self._store.check([self._key(one)])]:
                found[rank] = pickle.loads(zlib.decompress(self._store.get(self._key(rank))))
                lacking.remove(rank)
            if not lacking:
                break
            limit = config().checkpoint_timeout
            if self._generation.communicator.aborted:
                limit = min(limit, _AFTER_ABORT)
            if not growth.goes_on((len(lacking), *map(self._beat_of, lacking)), limit):
                named = ", ".join(map(str, lacking))
                found |= dict.fromkeys(lacking, (None, ""))
                why = f"rank {named} has written nothing for {limit:g} s"
                return [], [*self._reasons(found), f"{why} (it has ended, or its disk does not answer)"]
            sleep(pause)
            pause = min(_LONGEST, 2 * pause)
        return [found[rank][0] for rank in range(self._size)], self._reasons(found)

    def _reasons(self, found: dict[int, tuple[Any, str]]) -> list[str]:
        return [f"rank {rank}: {reason}" for rank, (_, reason) in sorted(found.items()) if reason]

    def _beat_of(self, rank: int) -> bytes:
        key = self._key(rank, "beat")
        return bytes(self._store.get(key)) if self._store.check([key]) else b""


def tell(text: str) -> None:
    """Print on standard error something that does not end the training."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def why_not_written(error: BaseException) -> str:
    """``error`` in one line: if the disk caused it, the disk's error, which torch hides behind its own."""
    chain: list[BaseException] = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < _MOST_CAUSES:
        chain.append(earlier)
    return cause_text(next((one for one in reversed(chain) if isinstance(one, OSError)), error))


class _Growth:
    """Whether something still changes."""

    def __init__(self, value: object) -> None:
        self._value, self._since = value, monotonic()

    def goes_on(self, value: object, limit: float) -> bool:
        """Whether ``value`` has changed in the last ``limit`` seconds."""
        if value != self._value:
            self._value, self._since = value, monotonic()
        return monotonic() - self._since <= limit
