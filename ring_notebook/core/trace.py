"""Native events as a Chrome trace: one file per rank, and one of all ranks on one clock.

`stop` collects the events of all ranks over the network and writes the latter; without `stop`,
`launch.merge_traces` merges the ranks' files.

The events' clock is the host's monotonic one. Each rank adds the difference to the wall clock: ranks of one host then
agree to about a microsecond, ranks of several hosts as well as the hosts' clocks do.

A rank is a process of the trace and a group is a thread of it: a group carries out one operation at a time, so its
phases follow one another; a group's operations by name have a thread of their own. Operations that are queued, or wait
until all ranks have started their name, and messages under way overlap: they are shown as asynchronous events.
Another thread shows what the program waits for: an operation ("held", and "held up" while other ranks have not come),
a message, a group of another backend, data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic_ns, time_ns
from typing import Any

from ring_notebook.analysis import operation_log
from ring_notebook.core import background_programs, native, other_waits, world
from ring_notebook.core.buffers import from_memoryview
from ring_notebook.protocol.records import COUNTED, PROGRAM, TRAINING
from ring_notebook.text.words import TRANSPORTS, is_gate

# Events of a run in a notebook: some megabytes per rank, which are sent to the kernel.
_CAPACITY = 3 << 13
_COUNTS = 1 << 11  # readings of a rank's counters; if there are more, every other one is dropped

_path: Path | None = None
_file: GrowingTrace | None = None  # this rank's own
_kept: list[dict[str, Any]] | None = None  # events of generations that have ended, while `record` is in effect
_training = 0  # when the recorded training began, on the monotonic clock
_counts: list[tuple[int, Mapping[str, float]]] = []  # readings since `_training`, for `_kept`


def active() -> bool:
    """Whether a recording is running."""
    return _path is not None


def start(path: str) -> None:
    """Start a recording for ``path``; a recording under way ends.

    Until `stop`, ``path`` is rank 0's own file, for a look while the job runs. Raises NotInitializedError when no
    generation is open, and FileNotFoundError when the folder of ``path`` is missing.
    """
    global _path, _file
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(
            f"the timeline {path} cannot be written: folder {Path(path).parent} does not exist; create it first"
        )
    current = world.current()
    finish()
    current.communicator.record()
    other_waits.keep()
    world.at_close(finish)
    _path = Path(path)
    ahead = _clock_offset()
    labels: list[dict[str, Any]] = []  # added when the ranks have agreed on a transport for GPUs

    def news() -> list[dict[str, Any]]:
        nonlocal labels
        events = [
            *_trace(current.rank, current.communicator.recorded(end=False), ahead),
            *_waits(current.rank, other_waits.take(), ahead),
        ]
        if events and not labels:
            labels = _labels(current.rank, _transport(current))
            events += labels
        return events

    _file = GrowingTrace(
        _path.with_suffix(f".rank{current.rank}{_path.suffix}"),
        _path if current.rank == 0 else None,
        _head(current.rank),
        news,
    )


def stop() -> None:
    """End the recording; all ranks of the generation call it. Rank 0 writes the trace of all ranks to its path."""
    background_programs.settle()
    path = _path
    events = finish()
    if path is None:
        return
    current = world.current()
    text = bytearray(json.dumps(events).encode())
    work = current.communicator.allgather(from_memoryview(text), name="timeline")
    if current.rank == 0:
        merged: list[dict[str, Any]] = []
        begin, everything = 0, bytes(work.output())
        for count in work.counts():
            merged += json.loads(everything[begin : begin + count])
            begin += count
        if merged:  # empty if the disk of every rank was full
            _write(path, merged)


def finish() -> Sequence[dict[str, Any]]:
    """End the recording of this rank alone and complete its file. Returns the events."""
    global _path, _file
    file, _path, _file = _file, None, None
    if file is None:
        return []
    events = file.close()
    world.current().communicator.recorded()
    return events


def record() -> None:
    """Begin to record in memory, for `take`. Raises NotInitializedError when no generation is open."""
    global _kept, _training, _counts
    world.current().communicator.record(_CAPACITY)
    world.at_close(_keep)
    other_waits.keep()
    _kept, _training, _counts = [], monotonic_ns(), []


def begin_training(at: float) -> None:
    """Training began ``at`` a moment of the monotonic clock, in seconds: earlier events are set-up."""
    global _training, _counts
    _training = int(at * 1e9)
    _counts = [one for one in _counts if one[0] >= _training]


def count(values: Mapping[str, float]) -> None:
    """Record the present ``values`` of `TimeSpent.counted`. Any thread may call it."""
    if _kept is not None:
        _counts.append((monotonic_ns(), values))
        if len(_counts) > _COUNTS:
            del _counts[1::2]


def take() -> list[dict[str, Any]]:
    """This rank's events since `record`, in the generation that was open then; call it after that has closed."""
    global _kept
    events, _kept = _kept or [], None
    return events


def last_operations(members: Sequence[int], generation: int) -> list[dict[str, Any]]:
    """The last operations of this rank since ``generation``, for `operation_log.complete`.

    ``members`` are the run's ranks, numbered as in the job. The first living rank of a host adds the operations of dead
    ranks there.
    """
    place = world.prepare_host()
    own, mates = place.topology.rank, place.mates
    dead = [rank for rank in mates if rank != own and place.ring_memory.dead(mates.index(rank))]
    mine = [own, *dead] if own == min(set(mates) - set(dead)) else [own]
    found: list[operation_log.Operation] = []
    for rank in (one for one in mine if one in members):
        path = place.logs[rank] if place.logs else native.operation_log().path
        number = members.index(rank)
        calls = operation_log.parse(operation_log.read_log(path), number)
        found += [one for one in calls if one.generation >= generation & 0xFFFFFFFF]
        if rank in dead and calls:
            found.append(operation_log.died(calls[-1]))
    return operation_log.as_events(found)


def tell_operations(run: str) -> list[dict[str, Any]]:
    """`last_operations` of ``run``, if this rank executes it now; for a kernel that asks while the cell runs."""
    members, generation = world.run_members(run)
    return last_operations(members, generation) if members else []


def _keep() -> None:
    if _kept is not None:
        current = world.current()
        ahead = _clock_offset()
        recorded, waits = current.communicator.recorded(), other_waits.take()
        # A long training has lost its oldest events: count from the oldest that is left.
        known = [min(begin for begin, *_ in recorded)] if len(recorded) >= _CAPACITY else []
        known += [min(wait.begin for wait in waits)] if len(waits) >= other_waits.KEPT else []
        _kept.extend([*_head(current.rank), *_labels(current.rank, _transport(current))])
        _kept.extend(_trace(current.rank, recorded, ahead))
        _kept.extend(_waits(current.rank, waits, ahead))
        for moment in (max(_training, *known, 0), monotonic_ns()):
            _kept.append({**_of_program(current.rank, moment + ahead, 0, TRAINING, TRAINING), "ph": "i", "s": "t"})
        for moment, values in _counts:
            event = _of_program(current.rank, moment + ahead, 0, COUNTED, COUNTED)
            _kept.append({**event, "ph": "C", "args": values})


def _waits(rank: int, waits: Iterable[other_waits.Wait], ahead: int) -> list[dict[str, Any]]:
    return [_of_program(rank, wait.begin + ahead, wait.end - wait.begin, wait.phase, wait.what) for wait in waits]


def _of_program(rank: int, begin: int, duration: int, phase: str, what: str) -> dict[str, Any]:
    """An event for a wait of the program outside of our groups' operations; times are in nanoseconds."""
    times = {"ts": begin / 1000, "dur": duration / 1000}
    return {"name": what, "cat": phase, "ph": "X", **times, "pid": rank, "tid": PROGRAM, "args": {}}


def _clock_offset() -> int:
    """Nanoseconds by which the wall clock is ahead of the monotonic one, from the quickest of several readings."""
    readings = []
    for _ in range(100):
        before, wall, after = monotonic_ns(), time_ns(), monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def _transport(current: world.World) -> str:
    """What moves tensors on GPUs in this generation; empty before the first."""
    return TRANSPORTS.get(current.communicator.device_transport()[0], "")


def _head(rank: int) -> list[dict[str, Any]]:
    about = {"ph": "M", "cat": "", "pid": rank}
    return [
        {**about, "name": "process_name", "tid": 0, "args": {"name": f"rank {rank}"}},
        {**about, "name": "thread_name", "tid": PROGRAM, "args": {"name": "what the program waits for"}},
    ]


def _labels(rank: int, text: str) -> list[dict[str, Any]]:
    """The text that a viewer shows beside the name of a rank."""
    named = {"ph": "M", "name": "process_labels", "cat": "", "pid": rank, "tid": 0, "args": {"labels": text}}
    return [named] if text else []


def _trace(
    rank: int, events: list[tuple[int, int, str, str, str, int, int, int, int]], ahead: int
) -> list[dict[str, Any]]:
    trace: list[dict[str, Any]] = []
    for begin, end, phase, operation, name, sequence, nbytes, group, last in events:
        arguments: dict[str, Any] = {"sequence": sequence, "bytes": nbytes}
        if last >= 0:
            arguments["last to arrive"] = last
        event = {
            "name": name if is_gate(operation, name) else f"{operation} {name}".strip(),
            "cat": phase,
            "ts": (begin + ahead) / 1000,  # microseconds, as the format has them
            "pid": rank,
            "tid": PROGRAM if phase in ("held", "held up") else group,
            "args": arguments,
        }
        if phase in ("queued", "negotiating") or operation in ("send", "receive"):
            event["id"] = f"{rank}.{group}.{sequence}.{begin}.{name}"
            trace += [{**event, "ph": "b"}, {**event, "ph": "e", "ts": (end + ahead) / 1000}]
        else:
            trace.append({**event, "ph": "X", "dur": (end - begin) / 1000})
    return trace


def _write(path: Path, events: list[dict[str, Any]]) -> None:
    """Write everything, or nothing and a line on stderr: a full disk must not fail a training at its end."""
    try:
        if path.is_file():
            path.unlink()  # it was a second name of rank 0's own file
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        report_unwritten(path, error)


PERIOD = 1.0
"""Seconds between additions."""
_BEGIN, _END = b'{"displayTimeUnit": "ms", "traceEvents": [', b"\n]}\n"

Events = Sequence[dict[str, Any]]


class GrowingTrace:
    """The file ``path``, to which a thread adds the events of ``take``, until `close`.

    ``shown`` is a second name of the file while it grows, if any, and replaces a file of that name. A full disk does
    not fail the training: the file is removed, a line on stderr says why, and nothing more is written.
    """

    def __init__(self, path: Path, shown: Path | None, begin: Events, take: Callable[[], Events]) -> None:
        self._path = path
        self._shown = shown
        self._take = take
        self._file = -1
        self._size = len(_BEGIN)
        self._closing = Event()
        try:
            path.unlink(missing_ok=True)  # a killed job may have left it with a second name
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.pwrite(self._file, _BEGIN + _END, 0)
            self._add(begin)
            self._show()
        except OSError as error:
            self._fail(error)
        self._thread = Thread(target=self._grow, name="ring-timeline", daemon=True)
        self._thread.start()

    def close(self) -> Events:
        """Add the remaining events; returns all events of the file."""
        self._closing.set()
        self._thread.join()
        self._add_new()
        if self._file < 0:
            return []
        os.close(self._file)
        events: Events = json.loads(self._path.read_bytes())["traceEvents"]
        return events

    def _grow(self) -> None:
        while not self._closing.wait(PERIOD):
            self._add_new()

    def _add_new(self) -> None:
        events = self._take()
        if self._file >= 0 and events:
            try:
                self._add(events)
            except OSError as error:
                self._fail(error)

    def _add(self, events: Events) -> None:
        # Overwrite the old end in one write: only a read at that moment can see part of both.
        comma = b",\n" if self._size > len(_BEGIN) else b"\n"
        data = comma + ",\n".join(map(json.dumps, events)).encode()
        left, at = memoryview(data + _END), self._size
        while left:
            written = os.pwrite(self._file, left, at)
            left, at = left[written:], at + written
        self._size += len(data)

    def _show(self) -> None:
        if self._shown is None or (self._shown.exists() and not self._shown.is_file()):  # a device
            return
        with suppress(OSError):  # a file system without links: there is only `path` while it grows
            self._shown.unlink(missing_ok=True)
            os.link(self._path, self._shown)

    def _fail(self, error: OSError) -> None:
        if self._file >= 0:
            if self._shown is not None and self._shown.exists() and self._shown.samefile(self._path):
                self._shown.unlink()
            os.close(self._file)
            self._file = -1
        report_unwritten(self._path, error)


def report_unwritten(path: Path, error: OSError) -> None:
    """Report on stderr that ``path`` cannot be written, and remove it."""
    with suppress(OSError):
        if path.is_file():  # not a device
            path.unlink()
    print(f"the timeline {path} cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201
