"""The timeline of a job: merges the parts that its ranks wrote on this disk into one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class Traces:
    """The file that ``RING_TIMELINE`` of ``env`` names, and its parts, as they are before a job of ``n`` ranks."""

    def __init__(self, env: Mapping[str, str], n: int) -> None:
        name = env.get("RING_TIMELINE", env.get("HOROVOD_TIMELINE", ""))
        self._path = Path(name).absolute() if name else None
        self._n = n
        self._before = self._stamps()

    def merge(self) -> str:
        """Merge the parts that the job has written here; returns the problem to report, if any.

        Leaves alone a file that the job has written itself: ranks that call ``stop_timeline`` gather it over the
        network, where a part may lie on another host's disk.
        """
        after = self._stamps()
        new = [path for path, stamp in after.items() if self._before.get(path) != stamp]
        if self._path is None or self._path in new:
            return ""
        events: list[Any] = []
        merged = 0
        for part in new:
            try:
                events += json.loads(part.read_text())["traceEvents"]
            except (OSError, ValueError):  # its rank was killed while it wrote
                continue
            merged += 1
        if not merged:
            return f"no rank has written a timeline for {self._path} on this host"
        try:
            if self._path.is_file():
                self._path.unlink()  # it is a name of rank 0's part
            self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            with suppress(OSError):
                if self._path.is_file():  # and not a device
                    self._path.unlink()
            return f"the timeline {self._path} cannot be written: {error.strerror}"
        missing = f"{self._path} shows {merged} of {self._n} ranks: the others were killed or write to another disk"
        return missing if merged < self._n else ""

    def _stamps(self) -> dict[Path, int]:
        path = self._path
        if path is None:
            return {}
        # The names that core.trace gives to them.
        parts = [path.with_suffix(f".rank{rank}{path.suffix}") for rank in range(self._n)]
        stamps = {one: one.stat().st_mtime_ns for one in (path, *parts) if one.exists()}
        if {path, parts[0]} <= stamps.keys() and path.samefile(parts[0]):
            del stamps[path]  # what rank 0 shows while the job runs
        return stamps
