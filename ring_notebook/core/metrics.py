"""log, log_params and track: the rows and pictures that this rank has recorded and that were not drained yet.

Numbers on a device are copied in the background, and read when they have arrived.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Number
from time import monotonic, monotonic_ns, sleep, time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ring_notebook.config import config
from ring_notebook.core import other_waits
from ring_notebook.core.step_points import between_steps, in_pass
from ring_notebook.machine.gpus import gpus
from ring_notebook.machine.hardware import WaitsForCore
from ring_notebook.protocol.records import MEDIA, Display, MetricBatch
from ring_notebook.rank.exit_watch import at_exit

if TYPE_CHECKING:
    from ring_notebook.core.logged_media import MediaLog
    from ring_notebook.core.time_spent import ScriptMeter

T = TypeVar("T")
_Row = tuple[float, int, dict[str, Any]]
Position = tuple[int, int | None, int, float, tuple[int, float] | None]
"""Where the rows of a run are: how many there are, the batch of `track`, the step of the last row, the samples of this
rank, and the step and number of the epoch in progress, as far as the rows have them."""

# Seconds between rows of a tracked loop that calls no `log`: they show its throughput.
_TRACK_PERIOD = 0.2
_PRINT_PERIOD = 1.0
_LAST_WAIT = 5.0  # seconds to wait for numbers on a device at the end of a script
_LONGEST_UNIT = 24  # characters


class _Recorder:
    """The rows of this process. One thread logs, another may drain: a deque needs no lock for that."""

    def __init__(self) -> None:
        self.rows: deque[_Row] = deque()
        self.attached = False
        self.printed = 0.0
        self.prints_last = False
        self.reset()

    def reset(self) -> None:
        self.rows.clear()
        self.carried: dict[str, float] = {}
        self.logged = 0
        self.step: int | None = None  # the newest batch that `track` has yielded, from 0; not those of outer loops
        self.batches_per_step = 1
        self.innermost: _Pass | None = None  # of the loops over `track` in progress
        self.samples = 0.0  # in the batches yielded since the last row
        self.all_samples = 0.0  # in the rows
        self.waited = 0.0
        self.queued = 0.0  # of `waited`: seconds of waiting for a core
        self.flushed = 0.0
        self.progress = (0, 0)
        self.loops: Callable[[str, bool], Callable[[int], None]] | None = None
        self.on_first_row: Callable[[], Callable[[], None]] | None = None
        self.on_next_step: tuple[int, Callable[[], None]] | None = None  # the step of that row, and a call after it
        self.warmup = 1
        self.first_step: int | None = None
        self.turn: tuple[int, int] | None = None  # the logical rank whose turn it is, and its number on this rank
        self.of_turns: dict[int, tuple[int, int]] = {}  # rows and batches in turns, by the logical rank's number here
        self.outside = (0, 0)  # rows and batches outside of turns
        self.latest = 0  # the step of the last row
        self.made = self.points = 0  # steps of this run that have rows, and points that it has passed (`steering`)
        self.epoch: tuple[int, float] | None = None  # the step of the first row with this epoch
        self.earlier: list[dict[str, float]] = []  # totals of the run that this one continues, until drained
        self.earlier_samples = 0.0
        self.units: dict[str, str] = {}
        self.new_units: dict[str, str] = {}
        self.media: MediaLog | None = None
        self.meter: ScriptMeter | None = None

    def add(self, now: float, step: int | None, values: dict[str, Any]) -> None:
        if step is None:
            step = (self.logged if self.step is None else self.step) // self.batches_per_step
        if self.turn is not None:
            values = {"logical_rank": float(self.turn[0]), **values}
        self.made += self.first_step is None or step != self.latest
        self.latest = step
        if self.first_step is None:
            self.first_step = step
        if self.on_first_row is not None and step - self.first_step >= self.warmup - 1:
            self.on_next_step, self.on_first_row = (step, self.on_first_row()), None
        elif self.on_next_step is not None and step != self.on_next_step[0]:
            self.on_next_step[1]()
            self.on_next_step = None
        self.logged += 1
        if self.carried:
            values = {**values, **{name: value for name, value in self.carried.items() if name not in values}}
        if self.samples:
            values.setdefault("samples", self.samples)
            self.samples = 0.0
            self.flushed = monotonic()
        if isinstance(samples := values.get("samples"), int | float):
            self.all_samples += samples
        if type(epoch := values.get("epoch")) is float and (self.epoch is None or epoch > self.epoch[1]):
            self.epoch = (step, epoch)
        self.rows.append((now, step, values))
        if not self.attached:
            self.print_row()
            if self.meter is not None:
                self.meter.add(step, values)

    def present_step(self) -> int:
        return self.latest if self.step is None else self.step // self.batches_per_step

    def next_step(self) -> int:
        """The number that rows of the next step will have."""
        if self.step is not None:
            return self.present_step() + 1
        if not self.made:
            return (self.latest + 1 if self.logged else 0) + self.points
        return self.latest + 1 + (self.made < self.points)  # a loop may log a step before its point, or after it

    def enter(self, turn: tuple[int, int] | None) -> None:
        """Begin the turn of a logical rank, given with its number on this rank; None: leave the turns.

        Rows get the number of the logical rank. Its counts of rows and batches are as if it were the only one: they
        include those outside of turns. Outside of turns the counts of the first logical rank apply.
        """
        logged, tracked = self.logged, 0 if self.step is None else self.step + 1
        left, entered = (0 if one is None else one[1] for one in (self.turn, turn))
        if self.turn is None:
            own = self.of_turns.get(left, (0, 0))
            self.outside = logged - own[0], tracked - own[1]
        else:
            self.of_turns[left] = logged - self.outside[0], tracked - self.outside[1]
        self.logged, tracked = (
            of_all + own for of_all, own in zip(self.outside, self.of_turns.get(entered, (0, 0)), strict=True)
        )
        self.step = tracked - 1 if tracked else None
        self.turn = turn

    def forget_turns(self) -> None:
        """Logical ranks are divided anew: all of them continue from this rank's counts."""
        self.turn, self.of_turns = None, {}

    def show(self, kind: str, step: int | None, values: Any) -> None:
        """Keep pictures, figures, histograms or texts, up to the limits of a run; a script keeps none."""
        if not self.attached:
            return
        if self.media is None:
            from ring_notebook.core.logged_media import MediaLog  # imports numpy

            self.media = MediaLog()
        if step is None:
            step = self.present_step()
        for name, value in (values if isinstance(values, Mapping) else {kind: values}).items():
            if not isinstance(name, str):
                raise TypeError(f"log: {kind} {name!r:.100} must have a text for a name")
            _check_name(name)
            self.media.add(kind, name, step, value)

    def print_row(self) -> None:
        """In a plain script rank 0 prints the latest row once a second; the other rows are dropped."""
        if not self.prints_last:
            self.prints_last = True
            at_exit(self.print_last)
            self.measure()
        if monotonic() - self.printed < _PRINT_PERIOD:
            # Keep the latest row that can be printed: without a notebook nothing drains the rows.
            while len(self.rows) > 1 and _is_there(self.rows[1]):
                self.rows.popleft()
            return
        self.print_latest()

    def measure(self) -> None:
        """In a script of `ringrun`: measure its steps, and report them when it ends."""
        if config().warmup:
            from ring_notebook.core.time_spent import ScriptMeter

            self.meter = ScriptMeter(config().warmup, bool(gpus()), totals)
            at_exit(self.meter.report)

    def print_last(self) -> None:
        """At the end of a script: print the last row, if it came less than a second after the last printed one."""
        if self.rows and not self.attached:
            _is_there(self.rows[-1], monotonic() + _LAST_WAIT)
            self.print_latest()

    def print_latest(self) -> None:
        """Print the latest row whose numbers have arrived, on rank 0, and drop the rows before it."""
        from ring_notebook.core import world

        later: list[_Row] = []
        while self.rows and not _is_there(self.rows[-1]):
            later.append(self.rows.pop())
        if not self.rows:
            self.rows.extend(reversed(later))
            return
        _, step, values = self.rows[-1]
        self.rows.clear()
        self.rows.extend(reversed(later))
        self.printed = monotonic()
        if world.is_initialized() and world.current().rank != 0:
            return
        numbers = "  ".join(f"{name} {read(value):.6g}" for name, value in values.items())
        sys.stdout.write(f"step {step}  {numbers}\n")
        sys.stdout.flush()


def _is_there(row: _Row, deadline: float = 0.0) -> bool:
    """Whether every number of ``row`` has arrived from its device; waits until ``deadline``."""
    return all(has_arrived(value, deadline) for value in row[2].values())


_recorder = _Recorder()
_valid_names: set[str] = set()  # names that were checked already
_watched: dict[str, Any] = {}
_held: Position = (0, None, 0, 0.0, None)  # see `hold_position`


def log(step: int | None = None, *, units: Mapping[str, str] | None = None, **values: Any) -> None:
    """Record numbers of this rank, for example ``log(loss=loss, samples=len(x))``; returns at once.

    A value is a number, or a tensor or array with one element. A value on a device is copied in the background and read
    when it has arrived, so that training never waits for it. ``step`` defaults to the batch of `track`, else to the
    count of calls. ``samples`` (the number of samples of this step) gives the throughput; `track` adds it by itself.
    ``units`` gives units that names of metrics do not tell: ``units={"length": "tokens"}``. In a notebook every row
    reaches the run's record; in a script rank 0 prints one line a second.

    ``image`` (an array or tensor, a PIL image), ``figure`` (of matplotlib; it is closed), ``histogram`` (an array or
    tensor) and ``text`` are shown in notebooks; a dictionary has several of a kind by name:
    ``log(image={"input": x, "mask": y})``. They are read at once, even from a device. An image keeps at most 512 pixels
    a side, a text 20,000 characters; each rank keeps the first 500, or 32 MiB, in a run.

    Raises TypeError, which names the metric, for a value of a wrong kind, and for a ``step`` that is not an integer.
    """
    if step is not None and not hasattr(step, "__index__"):
        raise TypeError(f"log: step must be an integer, got {step!r}; give metrics by name, as in log(loss=0.5)")
    shown = []
    for name, value in values.items():
        if name not in _valid_names:
            _check_name(name)
        if type(value) is not float:
            if name in MEDIA and not isinstance(value, Number):
                shown.append(name)
            else:
                values[name] = _number(name, value)
    if units is not None and units != _recorder.units:
        _note_units(units)
    pictures = {kind: values.pop(kind) for kind in shown}
    for name in _watched.keys() & values.keys():
        _watched[name] = values[name]
    if values or not pictures:
        _recorder.add(time(), step, values)
    for kind, value in pictures.items():
        _recorder.show(kind, step, value)


def _note_units(units: Mapping[str, str]) -> None:
    if not isinstance(units, Mapping) or not all(isinstance(one, str) for item in units.items() for one in item):
        raise TypeError(f'log: units must be texts by metric, as in units={{"length": "tokens"}}, got {units!r:.100}')
    for name, unit in units.items():
        if _recorder.units.get(name) != unit:
            _check_name(name)
            _check_name(unit)
            _recorder.units[name] = _recorder.new_units[name] = unit[:_LONGEST_UNIT]


def watch(name: str) -> None:
    """Keep what is logged under ``name`` from now on for `take`."""
    _watched[name] = None


def take(name: str) -> float | None:
    """The newest value of a watched metric; None if there is no new one since the last call."""
    value, _watched[name] = _watched.get(name), None
    return None if value is None or not has_arrived(value, monotonic() + _LAST_WAIT) else float(read(value))


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"metric {name!a} is not a name: {error.reason}; use text that UTF-8 can encode") from None
    _valid_names.add(name)


def _number(name: str, value: Any) -> Any:
    """``value`` as a float, or as a copy from its device that becomes a float when it is drained."""
    if not getattr(value, "is_cpu", True) and _is_number(value):
        return copy_from_device(value)
    try:
        if hasattr(value, "item") and getattr(value, "is_cpu", True):
            return float(value.item())
        if hasattr(value, "item"):
            raise ValueError("there is no number to copy")
        if not isinstance(value, (str, bytes, bytearray)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    shape = getattr(value, "shape", None)
    kind = type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
    raise TypeError(f"metric {name!r} is not a number: got {kind}; log one number per name, such as its mean")


def _is_number(tensor: Any) -> bool:
    """Whether a tensor on a device has one element of a real dtype."""
    return (
        tensor.numel() == 1 and not getattr(tensor, "is_meta", False) and not getattr(tensor.dtype, "is_complex", False)
    )


note_turn, forget_turns, next_step = _recorder.enter, _recorder.forget_turns, _recorder.next_step


def note_batches_per_step(batches: int) -> None:
    """From now on the optimizer makes one step per ``batches`` (gradient accumulation); rows count its steps."""
    _recorder.batches_per_step = batches


def carry(**values: float) -> None:
    """Add these values to every later row, until they change or the run ends."""
    _recorder.carried.update(values)


class _Pass:
    """A loop over `track` in progress. A loop over numbers (epochs) with another loop in it counts no steps."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder
        self._has_steps = True
        self._has_samples = self._began = False

    def __enter__(self) -> _Pass:
        self._outer = self._recorder.innermost
        if self._outer is not None:
            self._outer._leave_steps()
        self._recorder.innermost = self
        return self

    def __exit__(self, *_error: object) -> None:
        self._recorder.innermost = self._outer

    def count(self, samples: int) -> None:
        """Count a batch, before it is yielded."""
        self._began = True
        self._has_samples = self._has_samples or samples > 0
        if self._has_steps:
            self._recorder.step = 0 if self._recorder.step is None else self._recorder.step + 1

    def _leave_steps(self) -> None:
        if not self._has_steps or self._has_samples:
            return
        self._has_steps = False
        if self._began and self._recorder.step is not None:
            self._recorder.step = self._recorder.step - 1 if self._recorder.step else None


class track(Generic[T]):  # noqa: N801 - read as a verb: for batch in track(loader)
    """Iterate over ``loader`` and record samples, steps, progress and the time spent waiting for data.

    ``total`` is the number of steps of the whole training; without it the progress is that of each pass over
    the loader. The result can be iterated again, once per epoch, like the loader itself. ``shared_by`` is the number of
    ranks that train on the same batches together, like the stages of a pipeline: their samples count once. Raises
    ValueError where it is less than 1.
    """

    def __init__(self, loader: Iterable[T], total: int | None = None, shared_by: int = 1) -> None:
        if shared_by < 1:
            raise ValueError(f"track: shared_by must be at least 1 (ranks that share the batches), got {shared_by}")
        self._loader = loader
        self._total = total
        self._share = 1.0 / shared_by

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        recorder = _recorder
        try:
            total = self._total or len(self)
        except TypeError:
            total = 0
        done = recorder.progress[0] if self._total else 0
        batches = iter(self._loader)
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        loop = recorder.loops(place, bool(self._total)) if recorder.loops else None
        del caller  # the frame refers to the batches
        with in_pass(), _Pass(recorder) as this, WaitsForCore() as queued:
            while True:
                recorder.progress = (done, total)
                if loop is not None:
                    loop(done)
                between_steps()
                started, before = monotonic_ns(), queued.seconds()
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                ended = monotonic_ns()
                recorder.waited += (ended - started) * 1e-9
                recorder.queued += queued.seconds() - before
                other_waits.data(started, ended)
                samples = _samples(batch)
                recorder.samples += self._share * samples
                this.count(samples)
                yield batch
                done += 1
                if recorder.samples and monotonic() - recorder.flushed > _TRACK_PERIOD:
                    recorder.add(time(), None, {})
        if recorder.samples:
            recorder.add(time(), None, {})


def _samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor; 0 for a number, as from a range.

    A batch of PyTorch Geometric is one graph of many, and has no dimension of samples.
    """
    if isinstance(batch, Number):
        return 0
    if isinstance(graphs := getattr(batch, "num_graphs", None), int):
        return graphs
    if getattr(batch, "shape", None):
        return int(batch.shape[0])
    parts = batch if isinstance(batch, (list, tuple)) else [*_parts(batch)]
    for part in parts:
        if isinstance(part, (list, tuple, Mapping)) or getattr(part, "shape", None):
            return _samples(part)
    return len(parts) if parts is batch and parts else 1


def _parts(batch: Any) -> Iterable[Any]:
    """The values of a mapping or a dataclass."""
    if isinstance(batch, Mapping):
        return batch.values()
    return (getattr(batch, one.name) for one in fields(batch)) if is_dataclass(batch) else ()


def begin(
    loops: Callable[[str, bool], Callable[[int], None]] | None = None,
    on_first_row: Callable[[], Callable[[], None]] | None = None,
    warmup: int = 1,
) -> None:
    """A run starts: drop all rows, then keep every row until it is drained.

    ``on_first_row`` is called before the row of step number ``warmup``, which is logged when that step is done. The
    function that it returns is called before the first row of the next step: a single row, such as a result, begins no
    training. ``loops`` is called with the place (``file:line``) of each loop that `track` begins, and whether its total
    covers all passes over the loader; the function that it returns is called before each step.
    """
    _recorder.reset()
    _watched.clear()
    _recorder.loops, _recorder.on_first_row, _recorder.warmup = loops, on_first_row, warmup
    _forget_params()
    _recorder.attached = True


def position() -> Position:
    """Where the rows of this run are. A step that has no row yet counts as done: a continuation makes the next one."""
    recorder = _recorder
    samples = recorder.earlier_samples + recorder.all_samples + recorder.samples
    behind = recorder.next_step() - 1 - recorder.latest if recorder.step is None and recorder.made else 0
    return recorder.logged + behind, recorder.step, recorder.latest + behind, samples, recorder.epoch


def hold_position(position: Position) -> None:
    """Remember another run's position, for a branch of it."""
    global _held
    _held = position


def continue_held() -> None:
    """Begin the branch: continue at the position of `hold_position`."""
    continue_at(_held)


def continue_at(position: Position) -> None:
    """Continue counting at another run's position, so that the curves of both lie over each other."""
    recorder = _recorder
    recorder.forget_turns()
    recorder.logged, recorder.step, recorder.latest, recorder.earlier_samples, recorder.epoch = position
    recorder.first_step, recorder.made = None, 0  # the other run's steps are no warm-up of this one
    recorder.progress = (0 if recorder.step is None else recorder.step + 1, 0)
    earlier = {"samples": recorder.earlier_samples}
    if recorder.epoch is not None:
        earlier |= {"epoch": recorder.epoch[1], "epoch_step": float(recorder.epoch[0])}
    recorder.earlier = [earlier]


def end() -> None:
    """The run has ended: print rows again, as in a script."""
    _recorder.attached = False


def is_attached() -> bool:
    """Whether a notebook's run gets the rows; a script prints them."""
    return _recorder.attached


def set_progress(done: int, total: int) -> None:
    """Set the steps of a training that no `track` counts; total 0 when unknown."""
    _recorder.progress = (done, total)


def progress() -> tuple[int, int]:
    """``(done, total)`` steps of the tracked loop; total 0 when unknown."""
    return _recorder.progress


def pass_point(points: int) -> None:
    """Note that all ranks have passed ``points`` points (`steering`) of this run."""
    _recorder.points = points


def totals() -> dict[str, float]:
    """Seconds that `track` has waited for data, the part of them spent waiting for a core, and samples."""
    return {"data_wait": _recorder.waited, "queued_for_data": _recorder.queued, "samples": _recorder.all_samples}


def drain(run: str, rank: int, limit: float = 0.0) -> list[MetricBatch]:
    """Take the rows recorded so far, one batch for each sequence of rows with the same names. Any thread may call it.

    The first row with a number that has not arrived from its device, and all rows after it, are left for the next call.
    With a ``limit`` in seconds it waits for the device and takes all rows: a number that has not arrived then is NaN.
    """
    batches: list[MetricBatch] = []
    rows = _recorder.rows
    deadline = monotonic() + limit if limit else 0.0
    for _ in range(len(rows)):
        if not _is_there(rows[0], deadline) and not limit:
            break
        now, step, values = rows.popleft()
        names = tuple(values)
        if not batches or batches[-1].names != names:
            earlier = _recorder.earlier.pop() if _recorder.earlier else {}
            batches.append(MetricBatch(run, rank, names, array("d"), _units_of(names), earlier))
        batches[-1].values.extend((now, step, *map(read, values.values())))
    return batches


def _units_of(names: Iterable[str]) -> dict[str, str]:
    """The units of these metrics that no earlier batch has sent."""
    new = _recorder.new_units
    return {name: new.pop(name) for name in names if name in new} if new else {}


def drain_shown(run: str, rank: int) -> list[Display]:
    """Take the images, figures, histograms and texts logged so far. Any thread may call it."""
    return [] if _recorder.media is None else _recorder.media.drain(run, rank)


_LONGEST = 200  # characters of a hyper-parameter that is not a number
_params: dict[str, Any] = {}
_params_logged: set[str] = set()
_params_changed = False
_expected: dict[str, float] = {}


def log_params(**values: Any) -> None:
    """Record hyper-parameters of the run, for example ``log_params(lr=0.1, model="small")``; returns at once.

    They are shown with the run, listed by ``%ring runs`` and compared. Those of a distributed optimizer and loader, and
    constants of the cell, are recorded without this call; a value given here takes precedence. A value that is not a
    number, str or bool is recorded as its text. Rank 0's values count where ranks differ.
    """
    global _params_changed
    _params.update({name: _plain(value) for name, value in values.items()})
    _params_logged.update(values)
    _params_changed = True


def note_params(again: bool = True, /, **values: Any) -> None:
    """Record values except those that the cell has logged itself; without ``again`` only new names."""
    global _params_changed
    for name, value in values.items():
        if name not in _params_logged and (again or name not in _params):
            _params[name] = _plain(value)
            _params_changed = True


def _forget_params() -> None:
    global _params_changed
    _params.clear()
    _expected.clear()
    _params_logged.clear()
    _params_changed = False


def expect_load(**values: float) -> None:
    """Send these values, by their names in `records.Load`, with each reading of the machine in this run."""
    _expected.update(values)


def expected_loads() -> dict[str, float]:
    """The values of `expect_load`. Any thread may call it."""
    return dict(_expected)


def drain_params() -> dict[str, Any] | None:
    """All hyper-parameters, when there are new ones since the last call; else None. Any thread may call it."""
    global _params_changed
    if not _params_changed:
        return None
    _params_changed = False
    return dict(_params)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value if not isinstance(value, str) else value[:_LONGEST]
    return str(value)[:_LONGEST]


_PAUSE = 0.001  # seconds


class DeviceNumber(Protocol):
    """A number that is being copied from a device."""

    def has_arrived(self) -> bool:
        """Whether `number` returns without waiting."""

    def number(self) -> float:
        """The number, once it has arrived."""


_copiers: list[Callable[[Any], DeviceNumber | None]] = []


def register_copier(copier: Callable[[Any], DeviceNumber | None]) -> None:
    """Register ``copier``, which begins to copy a number of its framework from a device and returns None for others."""
    _copiers.append(copier)


def copy_from_device(value: Any) -> Any:
    """Copy ``value``, an array of one number on a device: to the host in the background, or else on its device."""
    for copier in _copiers:
        if (number := copier(value)) is not None:
            return number
    return value.detach().clone()


def has_arrived(value: Any, deadline: float = 0.0) -> bool:
    """Whether `read` returns the value of the device. Waits until ``deadline``, on the monotonic clock."""
    if type(value) is float or not hasattr(value, "has_arrived"):
        return True
    while not _arrived(value):
        if monotonic() >= deadline:
            return False
        sleep(_PAUSE)
    return True


def _arrived(value: DeviceNumber) -> bool:
    try:
        return value.has_arrived()
    except RuntimeError:  # the device has failed; its next use raises the error
        return True


def read(value: Any) -> float:
    """The number; NaN if it has not arrived or its device has failed."""
    if type(value) is float:
        return value
    if not hasattr(value, "has_arrived"):
        return float(value)
    try:
        return float(value.number()) if value.has_arrived() else math.nan
    except RuntimeError:
        return math.nan
