"""Ends a launcher of somebody else's that hangs: one that does not start all ranks, or outlives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ring_notebook.launch.supervisor.rank_mark import RankMark

__all__ = ["LauncherWatch"]

_WARN_AFTER = 30.0
"""Seconds after which the user learns that ranks are missing: a host that does not answer, a queue."""
OUTLIVING = 30.0
"""Seconds that a launcher may take to end after its last rank."""
_LOOK = 0.5


class LauncherWatch:
    """Watches the launcher of ``n`` ranks, which have ``limit`` seconds to start (0: no limit).

    It calls ``kill``, in a thread of its own. ``say`` shows the user a line. While ``is_blocked``, marks of ranks may
    wait behind output that nobody reads, and no time passes.
    """

    def __init__(
        self,
        n: int,
        limit: float,
        kill: Callable[[], None],
        say: Callable[[str], None],
        is_blocked: Callable[[], bool],
    ) -> None:
        self.problem = ""
        """Why the launcher was killed before all ranks had started."""
        self.has_killed = False
        self._n = n
        self._limit = limit
        self._kill = kill
        self._say = say
        self._is_blocked = is_blocked
        self._started: set[int] = set()
        self._ended: set[int] = set()
        self._over = False
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="ring-launcher-watch", daemon=True).start()

    def take(self, mark: RankMark) -> None:
        """A rank has started or ended."""
        with self._changed:
            self._started.add(mark.rank)
            if mark.ended:
                self._ended.add(mark.rank)
            self._changed.notify_all()

    def close(self) -> None:
        """The launcher has ended."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _watch(self) -> None:
        if not self._wait_until(self._all_started, min(_WARN_AFTER, self._limit or _WARN_AFTER)):
            ends = f"; it is killed after {self._limit:g} s (--start-timeout)" if self._limit > _WARN_AFTER else ""
            self._say(f"the launcher has started {len(self._started)} of {self._n} ranks so far{ends}")
        if self._limit and not self._wait_until(self._all_started, self._limit - _WARN_AFTER):
            self.problem = (
                f"the launcher has started {len(self._started)} of {self._n} ranks within {self._limit:g} s; "
                "see what it waits for, or raise --start-timeout (RING_START_TIMEOUT)"
            )
            self._end()
            return
        self._wait_until(lambda: len(self._ended) >= self._n, None)
        if not self._wait_until(lambda: False, OUTLIVING):
            self._say(f"killing the launcher: all ranks ended {OUTLIVING:g} s ago, and it has not")
            self._end()

    def _end(self) -> None:
        self.has_killed = True
        self._kill()

    def _all_started(self) -> bool:
        return len(self._started) >= self._n

    def _wait_until(self, condition: Callable[[], bool], seconds: float | None) -> bool:
        """Whether the condition holds, or the launcher has ended, within that time."""
        left = seconds
        with self._changed:
            while not (self._over or condition()):
                if left is not None and left <= 0.0:
                    return False
                begun = time.monotonic()
                self._changed.wait(_LOOK if left is not None else None)
                if left is not None and not self._is_blocked():
                    # Not more at once: what came while a signal had stopped this process has yet to be read.
                    left -= min(time.monotonic() - begun, 2 * _LOOK)
        return True
