"""Executes a cell on this rank and reports in records how it ended."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import active_children
from time import perf_counter, time
from typing import Any, Literal

from ipyparallel.engine.datapub import publish_data
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.core import metrics, other_waits, step_points, trace, world
from ring_notebook.core.gradient_log import gradient_log
from ring_notebook.core.run_options import of_run
from ring_notebook.core.steering import present, steering
from ring_notebook.core.time_spent import TimeSpent
from ring_notebook.engine import (
    debuggers,
    descriptors,
    dialogue,
    held_memory,
    kept_variables,
    late_output,
    mpi_access,
    namespace,
    setup,
)
from ring_notebook.engine.capture import Capture, show_figures
from ring_notebook.engine.cell import Begin, Cell
from ring_notebook.engine.collectives_by_step import LoopCalls
from ring_notebook.engine.failure_record import describe, from_cell
from ring_notebook.engine.interrupt import Interruptible
from ring_notebook.engine.machine_load import Machine
from ring_notebook.engine.process_state import HeldBack, ProcessState, end_children
from ring_notebook.engine.publisher import Publisher
from ring_notebook.errors import CollectiveAborted, NotInitializedError, RingError
from ring_notebook.files.snapshot_files import kept_text
from ring_notebook.horovod.as_horovod import as_horovod
from ring_notebook.horovod.names import NAME
from ring_notebook.machine.energy import LACKS
from ring_notebook.protocol.knobs import HAS_STEPS
from ring_notebook.protocol.question import QUESTIONS, Question
from ring_notebook.protocol.records import RECORDS, SET, Ended, Failure, Load, Params, Record, Status, Trace, messages
from ring_notebook.protocol.ringtrain_options import CellRequest
from ring_notebook.rank.exit_watch import EndingForks
from ring_notebook.rank.rank_variables import master, rank_variables
from ring_notebook.text.words import plural

_LAST_WAIT = 5.0
"""Seconds to wait, when a run ends, for logged numbers on a device."""


def execute(request: CellRequest) -> None:
    """Run a cell as this rank's part of its run.

    Returns when the cell has ended and all records were sent; never raises the cell's exception.
    """
    mpi_access.withdraw_from_survivors(request.lost)
    of_run.begin(request.checkpoints, request.resume, request.options.sync_every, request.options.logical)
    own = not request.only or setup.rank() in request.only
    _Execution(request).execute(request.source if own else "")


class _Execution:
    """One rank's part of one run."""

    def __init__(self, request: CellRequest) -> None:
        self.request = request
        self.run = request.run
        self.rank = request.engines.index(setup.rank())
        branch = {name: value for name, value in request.options.branch.items() if name not in ("of", "run", "params")}
        self.begin = Begin(**branch) if branch else None
        self.cell: Cell | None = None
        self.calls = 0  # number of collectives
        self.aborted = False  # another rank failed first
        self.transport = ""  # of tensors on devices, once the ranks have agreed on it
        self.entered = False  # the kernel was told that the cell itself has begun
        self.error: BaseException | None = None  # the exception that has ended the cell, or this rank's part of the run
        self.reported = False
        self.state: ProcessState | None = None  # before the cell
        self.unmeasured = False  # the load of the machine could not be read, and the user was told
        self.loops = LoopCalls(_calls, lambda: self.cell.current_lines() if self.cell else ())
        self.spent = TimeSpent(metrics.totals)
        self.machine = _machine()
        self.capture = Capture(self.run, self.rank)
        self.interruptible = Interruptible(self.run)

    def execute(self, source: str) -> None:
        started = perf_counter()
        try:
            with self.interruptible:
                self._carry_out(source)
                self._report(perf_counter() - started)
        except BaseException as error:  # an error of this engine, not of the cell
            if self.reported:
                raise
            self.error = self._leave(error if self.error is None else self.error)
            self._report(perf_counter() - started)
        finally:
            self.error = None  # its frames refer to objects of the cell, such as the workers of a loader
        metrics.end()
        gradient_log.end()

    def _carry_out(self, source: str) -> None:
        """Run the cell and clean up after it; sets `error` to the exception that has ended it."""
        children = active_children()
        if held_memory.forget_failure():
            gc.collect()
        shell = InteractiveShell.instance()
        vars(shell)["ask_exit"] = sys.exit  # `exit()` ends the cell: IPython's own ends the engine, after a later cell
        metrics.begin(self.loops.begin, self._first_row, self.request.options.warmup)
        steering.begin(self.run, self.rank, self.request.changes, dialogue.pause, self._at_snapshot)
        if self.begin is not None:
            metrics.continue_held()
        until = self.request.options.until
        gradient_log.begin(self.run, self.rank, self.request.gradients, until, debuggers.break_in_cell)
        other_waits.begin()
        if setup.spool is not None:
            setup.spool.begin(self.run)
        # In this order: what was written before the cell is taken first.
        with self.capture.active(shell), Publisher(self._collect, _send):
            self.error = self.interruptible.call(lambda: self._run(shell, source))
            step_points.forget()
            if self.error is not None:
                self.error = namespace.original(self.error)
            # First, because drawing figures takes time, and other ranks may wait for this one.
            self.error = self._leave(self.error)
            self._end_steering()
            self._tell_lost_options()
            unshown = self.interruptible.call(show_figures)
            self.error = unshown if self.error is None else self.error  # not `or`: an exception may be falsy
            if self.error is not None and not _is_exit(self.error):
                self._put_back()
        if self.error is not None:
            end_children(kept=children)
            debuggers.keep_frames(from_cell(self.error, self.cell.file if self.cell else ""))

    def _at_snapshot(self, asked: Mapping[str, Any], number: int) -> None:
        """Save this rank's variables now, or before its next batch; all ranks have made the same steps."""
        keep = partial(self._keep_variables, asked, number)
        if step_points.is_in_pass() and not steering.is_paused:
            step_points.at_next_batch(keep)
        else:
            keep(behind=not step_points.is_in_pass())

    def _keep_variables(self, asked: Mapping[str, Any], number: int, behind: bool = False) -> None:
        cell = self.cell
        if cell is None:
            return
        place = {**asdict(replace(cell.place(), behind=behind)), "functions": cell.functions()}
        try:
            whole = kept_variables.save(
                asked["folder"], f"{self.run}-{number:08}", asked["about"], self.rank, len(self.request.engines), place
            )
        except RingError as error:
            self._say(str(error))
        else:
            if whole is not None and not asked.get("told"):  # else the cell that asks tells it
                self._say(kept_text(whole))

    def _end_steering(self) -> None:
        if (left := steering.end()) and self.rank == 0:
            sets = [f"{name}={value}" for one in left if one["action"] == SET for name, value in one["values"].items()]
            others = dict.fromkeys(one["action"] for one in left if one["action"] != SET)
            before = "before its next step" if steering.points else f"without a step of all ranks ({HAS_STEPS})"
            self._say(f"The run ended {before}: not taken are {', '.join([*sets, *others])}")

    def _tell_lost_options(self) -> None:
        if self.error is not None or self.rank != 0:
            return
        if of_run.is_lost("sync_every"):
            self._say(
                f"--sync-every {of_run.sync_every} had no effect: no optimizer of the cell was made by "
                "ring.prepare or DistributedOptimizer of PyTorch, which alone know local steps"
            )
        if of_run.is_lost("logical"):
            self._say(
                f"--logical {of_run.logical} had no effect: the cell has not called ring.prepare of "
                "PyTorch, which alone knows logical ranks"
            )
        if of_run.is_lost("resume"):
            self._say(
                "--resume had no effect: the cell has not called ring.checkpoint, which continues from "
                f"{of_run.resume}, or has called it with resume= or a folder= without checkpoints"
            )
        if gradient_log.has_not_stopped:
            self._say(f"Not stopped: logical ranks have made {plural(gradient_log.steps, 'step')} in this cell")

    def _put_back(self) -> None:
        if self.state is not None and (changed := self.state.put_back()):
            self._say(f"Put back, because the cell did not end well: {', '.join(changed)}")

    def _say(self, line: str) -> None:
        self.capture.write("stderr", f"{line}\n")

    def _run(self, shell: InteractiveShell, source: str) -> None:
        self.cell = Cell(shell, source, self.run, self.request.options.first_line, self.begin)
        namespace.provide_ring(self.cell.names())
        namespace.prepare_calls(self.cell.code)
        namespace.count_waits()
        if self.machine is not None:
            self.machine.threads = namespace.threads()
        self.state = ProcessState()
        opened = world.open_run(self.run, self.request.generation, self.request.engines)
        here = (opened.rank, opened.size, opened.local_rank, opened.local_size)
        os.environ.update(rank_variables(*here, master()))
        if self.request.options.timeline:
            trace.record()
            trace.count(self.spent.counted())
        if self.request.options.horovod:
            setup.wait_for_preload()
        try:
            with (
                as_horovod() if self.request.options.horovod else nullcontext(),
                dialogue.Listening(_ask),
                HeldBack(),
                EndingForks(),
            ):
                self.cell.execute()
                step_points.between_steps()
        except ModuleNotFoundError as error:
            if error.name == NAME:
                error.msg = f"{error.msg}; `%%ringtrain --horovod` makes it mean Ring Notebook in the cell"
            raise
        finally:
            debuggers.stop()

    def _leave(self, error: BaseException | None) -> BaseException | None:
        """Leave the generation; if this rank failed, abort it for all. Returns what ended this rank, if anything did.

        A device may fail after the last line of the cell.
        """
        self.transport = _transport() or self.transport
        own = next((entry for entry in world.snapshot() if entry["rank"] == self.rank), None)
        if own is not None:
            self.calls = max(0, own["sequence"] - 1)  # without the barrier that opened the generation
        if error is not None and not _is_exit(error):
            # Groups of other backends end after the generation: a connection error there means that another rank failed
            # first.
            self.aborted = world.is_aborted() and namespace.tells_of_lost_rank(error)
            world.fail(error)
        self.spent.end()
        trace.count(self.spent.counted())
        try:
            world.close_run()
        except CollectiveAborted as late:
            error = late if error is None else error
        self.aborted |= isinstance(error, CollectiveAborted)
        return error

    def _report(self, seconds: float) -> None:
        error = self.error
        descriptors.flush()
        records = [*self._trace(), *self._collect(rows=True, status=True, limit=_LAST_WAIT)]
        if failure := self._failure(error):
            records.append(failure)
        summary = {
            "line": self._line_of(error),
            "calls": self.calls,
            **self.spent.now(),
            LACKS: self.spent.energy.lacks,
            "left": late_output.is_left_by(self.run),
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        records.append(Ended(self.run, self.rank, self._status(error), seconds, summary))
        for message in messages(records):
            _send(message)
        self.reported = True

    def _trace(self) -> list[Record]:
        try:
            events = trace.take()
            if not events and self.error is not None and not _is_exit(self.error) and len(self.request.engines) > 1:
                events = trace.last_operations(self.request.engines, self.request.generation)
            return [Trace(self.run, self.rank, json.dumps(events).encode())] if events else []
        except Exception as error:  # usually a lack of memory
            self._say(f"Left out of the record: the timeline of rank {self.rank} ({type(error).__name__}: {error})")
            return []

    def _failure(self, error: BaseException | None) -> Failure | None:
        if error is None or isinstance(error, KeyboardInterrupt) or _is_exit(error):
            return None
        return describe(error, self.run, self.rank, self.cell.file if self.cell else "", self.aborted)

    def _status(self, error: BaseException | None) -> Literal["ok", "failed", "aborted", "interrupted"]:
        if error is None or _is_exit(error):
            return "ok"
        if isinstance(error, KeyboardInterrupt):
            return "interrupted"
        return "aborted" if self.aborted else "failed"

    def _line_of(self, error: BaseException | None) -> int:
        """The line of the cell that raised ``error`` or that it interrupted; 0 without an error."""
        line = 0
        while error is not None and self.cell is not None and not line:
            tb = error.__traceback__
            while tb is not None:
                if tb.tb_frame.f_code.co_filename == self.cell.file:
                    line = tb.tb_lineno or line  # an instruction may have no line
                tb = tb.tb_next
            error = error.__context__
        return line

    def _collect(self, rows: bool, status: bool, limit: float = 0.0) -> list[Record]:
        records: list[Record] = list(self.capture.drain())
        paused = steering.is_paused  # read before the rows: a status with a pause has all rows before it
        if rows:
            batches = metrics.drain(self.run, self.rank, limit)
            records += [*batches, *metrics.drain_shown(self.run, self.rank)]
            if given := metrics.drain_params():
                records.append(Params(self.run, self.rank, given))
            records += [*steering.drain(), *gradient_log.drain()]
        line = self.cell.current_line() if self.cell else 0
        if status or (line and not self.entered) or self.interruptible.unheard is not None:
            self.entered = line > 0
            records += [self._now(line, paused), *self._load()]
        return records

    def _first_row(self) -> Callable[[], None]:
        """Training begins here, if another step follows."""
        moment = self.spent.moment()
        trace.count(self.spent.counted())

        def begin() -> None:
            self.spent.begin_training(moment)
            trace.begin_training(moment[1])

        return begin

    def _load(self) -> list[Record]:
        """The load of this rank's machine. Where it cannot be read, tells the user once in a run."""
        if self.machine is None:
            return []
        try:
            return [Load(self.run, self.rank, time(), self.machine.read())]
        except Exception as error:  # for example, the cell has used up all descriptors
            if not self.unmeasured:
                self.unmeasured = True
                self._say(f"Left out of the record: the load of this machine ({type(error).__name__}: {error})")
            return []

    def _now(self, line: int, paused: bool) -> Status:
        """The status of this rank, at this line of the cell."""
        trace.count(self.spent.counted())
        self.transport = _transport() or self.transport
        return Status(
            run=self.run,
            rank=self.rank,
            time=time(),
            line=line,
            waiting=self._waiting(),
            progress=metrics.progress(),
            extra={
                **self.spent.now(),
                LACKS: self.spent.energy.lacks,
                "calls": _calls(),
                "loop": self.loops.report(),
                "pass": self.loops.number,
                "transport": self.transport,
                "statement": self.cell.current_statement() if self.cell else -1,
                "importing": self.cell.importing() if self.cell else "",
                "unheard": self.interruptible.unheard,
                "knobs": present(),
                "paused": paused,
                "points": steering.points,
            },
        )

    def _waiting(self) -> dict[str, Any] | None:
        """The collective or message that this rank waits for, and the ranks that have not called it."""
        own = next((entry for entry in world.snapshot() if entry["rank"] == self.rank), None)
        if own is not None and own["state"] in ("waiting", "moving"):
            return own
        other = other_waits.now()
        if other is None:
            return None
        what, seconds = other
        return {"rank": self.rank, "state": "waiting", "operation": what, "seconds": seconds, "missing": []}


def _calls() -> int:
    """The number of collectives that this rank has called in the run, without the barrier that opened it."""
    return max(0, world.calls() - 1)


def _transport() -> str:
    """What moves tensors on devices between all ranks: "nccl" or "host"; empty before the first."""
    try:
        return world.current().communicator.device_transport()[0]
    except NotInitializedError:
        return ""


def _send(message: bytes) -> None:
    if setup.spool is not None and (trouble := setup.spool.add(message)):
        print(f"{trouble}: until there is room, a notebook that attaches misses records of this rank", file=sys.stderr)  # noqa: T201
    publish_data({RECORDS: message})


def _ask(question: Question) -> None:
    publish_data({QUESTIONS: question.encode()})


def _machine() -> Machine | None:
    """The reader of this machine's load; None where the system forbids it, because a run must not fail for that."""
    try:
        return Machine()
    except Exception:
        return None


def _is_exit(error: BaseException) -> bool:
    """Whether ``error`` would end a script with success, like ``sys.exit()``."""
    return isinstance(error, SystemExit) and not error.code
