"""A control group that limits memory, for processes that are to run short of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def write(group: Path, name: str, value: int | str) -> bool:
    """Write a file of a control group; returns whether the file exists."""
    try:
        (group / name).write_text(str(value))
    except OSError:
        return False
    return True


@contextmanager
def small_group(limit: int) -> Iterator[Path]:
    """A control group limited to ``limit`` bytes, without swap; skips the test where none can be made."""
    of_this = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    root = Path("/sys/fs/cgroup")
    parent = root / "memory" / of_this["memory"][1:] if "memory" in of_this else root / of_this.get("", "/")[1:]
    group = parent / f"ring-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a control group for memory that this user can make: {error}")
    limited = write(group, "memory.limit_in_bytes", limit) or write(group, "memory.max", limit)
    write(group, "memory.memsw.limit_in_bytes", limit)
    write(group, "memory.swap.max", 0)
    try:
        if limited:
            yield group
    finally:
        while True:
            try:
                group.rmdir()  # empty as soon as the kernel has taken back the memory of what was killed
                break
            except OSError:
                time.sleep(0.05)
    if not limited:
        pytest.skip("control groups do not limit memory here")
