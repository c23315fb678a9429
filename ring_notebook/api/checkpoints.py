"""Checkpoints of a training in any framework: when they are written, which stay, and from which one it resumes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import isnan
from pathlib import Path
from time import monotonic
from typing import Any

import cloudpickle

from ring_notebook.api.basics import rank, size
from ring_notebook.api.objects import allreduce_numbers
from ring_notebook.api.rank_0_files import from_rank_0, read_on_rank_0, write_on_rank_0
from ring_notebook.core import logical_ranks, metrics
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.core.run_options import of_run
from ring_notebook.errors import RingError
from ring_notebook.files.checkpoint_folder import (
    CHECKPOINTS,
    REST,
    Found,
    LocalFolder,
    name_of,
    note_elsewhere,
    step_of,
)
from ring_notebook.files.remote_folder import RemoteFolder
from ring_notebook.text.error_text import cause_text
from ring_notebook.text.line_options import duration

_COUNT = re.compile(r"([1-9]\d*)\s*(step|epoch)s?")


class _Rhythm:
    """When a checkpoint is due. Raises ValueError for an ``every`` that is neither a time nor a count."""

    def __init__(self, every: str) -> None:
        match = _COUNT.fullmatch("1 epoch" if every == "epoch" else every)
        self.steps, self.epochs = (int(match[1]) if match and match[2] == what else 0 for what in ("step", "epoch"))
        self.seconds = 0.0
        if not match:
            with suppress(ValueError):
                self.seconds = duration(every)
            if not self.seconds:
                raise ValueError(
                    "checkpoint: every must be like '10min', '30 s', '2h', '100 steps', 'epoch' or '5 epochs', "
                    f"got {every!r}"
                )
        self._since = monotonic()

    def restart(self) -> None:
        """Begin to wait now."""
        self._since = monotonic()

    def is_due(self, steps: int, epochs: int, new: int) -> bool:
        """Whether one is due after ``steps`` and ``epochs``; ``new``: steps since the last call, 0 as an epoch ends."""
        if self.seconds and monotonic() - self._since >= self.seconds:
            self._since = monotonic()
            return True
        if self.steps:
            return steps % self.steps < new
        return bool(self.epochs) and not new and epochs % self.epochs == 0


class Checkpoint:
    """The checkpoints of one training. ``steps``, ``epoch`` and ``batch`` (in this epoch) say where it stands.

    Rank 0 writes a pickle with the state of each of ``objects``. A subclass for a framework defines this state by
    `state_of` and `restored`; its face's function ``checkpoint`` documents the other arguments.
    """

    _suffix = ".pickle"
    _all_write = False
    """Whether each rank writes a part."""
    _takes_urls = False
    """Whether the folder may be at any place that fsspec knows."""

    def __init__(
        self,
        objects: tuple[Any, ...],
        every: str,
        keep: int,
        best: str,
        largest: bool,
        folder: str | os.PathLike[str] | None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint: keep must be at least 1, got {keep}")
        if not self._takes_urls and is_url(folder):
            raise ValueError(
                f"checkpoint: folder={folder!r} is a URL, which only checkpoints of PyTorch take; pass a folder"
            )
        self.steps = 0
        self.epoch = 0
        self.batch = 0
        self._place: LocalFolder | RemoteFolder
        if is_url(folder):
            self.folder: Path | str = str(folder)
            self._place = RemoteFolder(self.folder)
        else:
            self.folder = Path(folder) if folder is not None else of_run.checkpoints or Path(CHECKPOINTS)
            self._place = LocalFolder(self.folder)
        self._is_of_run = folder is None
        self._noted_in = None if self._is_of_run else of_run.checkpoints
        self._objects = objects
        self._rhythm = _Rhythm(every)
        self._is_due = self._is_best_due = False
        self._keep = keep
        self._metric, self._sign = best, -1.0 if largest else 1.0
        self._best: float | None = None
        self._best_step = -1  # steps of the best one
        self._whole_best: tuple[float | None, int] = (None, -1)  # both, of the best one on disk
        self._written = -1  # steps of the last one
        if best:
            metrics.watch(best)

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Continue in another process, whose waiting time begins now and which does not watch the metric yet."""
        self.__dict__.update(attributes)
        self._rhythm.restart()
        if self._metric:
            metrics.watch(self._metric)

    def state_of(self, one: Any) -> Any:
        """The state of ``one`` object, as a checkpoint keeps it."""
        raise NotImplementedError

    def restored(self, one: Any, state: Any) -> Any:
        """The object ``one`` with this ``state`` from `state_of`: itself, or its replacement."""
        raise NotImplementedError

    def ranks_are_equal(self) -> bool:
        """Whether all ranks have the same state, so that a checkpoint can be written now."""
        return True

    def is_within_step(self) -> bool:
        """Whether the optimizer step of this batch is still to come: a checkpoint that is due waits for it."""
        return False

    def begin_epoch(self) -> None:
        """Called before an epoch begins, or continues after `batch` batches."""

    def end_epoch(self) -> None:
        self.epoch += 1
        self.batch = 0

    def end_training(self) -> None:
        """Called after all epochs, before the last checkpoint."""

    def step(self) -> None:
        """Count a batch that every rank has used, and write a checkpoint where one is due. All ranks call it.

        With logical ranks only the last turn of a round counts.
        """
        if (logical := logical_ranks.current()) is not None and logical.is_between:
            return
        self.steps += 1
        self.batch += 1
        self.write_when_due(1, self.logged())

    def epochs(self, total: int) -> Iterator[int]:
        """The remaining epochs of ``total``; the first one may continue in its middle."""
        while self.epoch < total:
            self.begin_epoch()
            yield self.epoch
            self.end_epoch()
            self.write_when_due(0, self.logged())
        self.end_training()
        self.write_last()

    def logged(self) -> float | None:
        """What `log` has recorded on rank 0 for ``best`` since the last call."""
        return metrics.take(self._metric) if self._metric and rank() == 0 else None

    def write_when_due(self, new: int, value: float | None) -> None:
        """Write a checkpoint if one is due after ``new`` steps, 0 at the end of an epoch.

        ``value`` is the newest value of the metric ``best``.
        """
        if rank() == 0:
            self._is_due |= self._rhythm.is_due(self.steps, self.epoch, new) | of_run.is_checkpoint_due
            of_run.is_checkpoint_due = False
            self._is_best_due |= self._is_best(value)
            if self._is_best_due:
                self.end_writing()  # the best weights must be kept before they change; other ranks wait in `_agreed`
        elif not self._all_write:
            return
        waits = self.steps > 0 and self.is_within_step()  # for the next call of `step`
        is_due = self._is_best_due or (self._is_due and not waits)
        if self.ranks_are_equal() and self._agreed(not self.is_writing() and is_due):
            self._write(self._agreed(self._is_now_best()))

    def write_last(self) -> None:
        """Write a checkpoint, unless the last one is of this step. Returns when it is whole.

        Raises RingError on all ranks where one of them cannot write its part.
        """
        self.wait()
        if self._agreed(self._written != self.steps or self._is_due):
            self._write(self._agreed(self._is_now_best()), is_last=True)

    def _agreed(self, own: bool) -> bool:
        """Rank 0's ``own``, if all ranks write; else this rank's."""
        if not self._all_write:
            return own
        # All ranks are at the same place of the loop, so this operation cannot match another one.
        return bool(allreduce_numbers([int(own and rank() == 0)], ReduceOp.MAX, "checkpoint is due")[0])

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background. Only rank 0's answer counts."""
        return False

    def end_writing(self) -> None:
        """Return when no checkpoint is being written. Only rank 0 calls this."""

    def wait(self) -> None:
        """Return when no checkpoint is being written in the background; all ranks call this."""

    def _is_best(self, value: float | None) -> bool:
        if value is None or isnan(value) or (self._best is not None and self._sign * value >= self._sign * self._best):
            return False
        self._best = value
        return True

    def _is_now_best(self) -> bool:
        """Whether a checkpoint of this step is the best, perhaps written before."""
        return self._is_best_due or self._best_step == self.steps

    def _begin_writing(self, is_best: bool) -> Callable[[bool], None]:
        """Returns what is to be called when the checkpoint is whole, or with False when it has failed."""
        self._written = self.steps
        self._is_due = self._is_best_due = False
        if is_best:
            self._best_step = self.steps
        best = self._best, self._best_step

        def end(is_whole: bool) -> None:
            if is_whole and is_best:
                self._whole_best = best
            elif not is_whole:
                self._written = -1
                if best == (self._best, self._best_step):  # else a better one is due
                    self._best, self._best_step = self._whole_best

        return end

    def _write(self, is_best: bool, is_last: bool = False) -> None:
        """Write a checkpoint; ``is_last``: no training follows."""
        end = self._begin_writing(is_best)
        target = Path(self.folder, name_of(self.steps, is_best, self._suffix))
        try:
            self.write(target)
        except BaseException:
            end(False)
            raise
        end(True)
        if rank() == 0:
            self.tidy(Found(self.steps, is_best, target))

    def content(self) -> dict[str, Any]:
        """The content of a checkpoint written now."""
        return {
            "objects": [self.state_of(one) for one in self._objects],
            "steps": self.steps,
            "epoch": self.epoch,
            "batch": self.batch,
            "best": self._best,
            "best_step": self._best_step,
            "best_of": [self._metric, self._sign],
            "position": _of_all(metrics.position(), size()),
        }

    def write(self, target: Path) -> None:
        """Write a checkpoint to ``target``, which appears whole or not at all."""
        write_on_rank_0(target, lambda file: cloudpickle.dump(self.content(), file), private=True)

    def read(self, path: Path | str) -> dict[str, Any]:
        """The `content` of the checkpoint at ``path``, on all ranks."""
        content: dict[str, Any] = read_on_rank_0(Path(path), cloudpickle.load, private=True)
        return content

    def check_kind(self, path: Path | str) -> None:
        """Raise RingError when the checkpoint at ``path`` is not one of this class."""
        if Path(path).suffix != self._suffix:
            raise RingError(
                f"rank {rank()}: {path} was written with another framework; this one reads files that end in "
                f"{self._suffix}"
            )

    def resume(self, path: Path | str) -> None:
        """Load the checkpoint at ``path``, on all ranks. Raises RingError when it is damaged, or of other objects."""
        self.check_kind(path)
        content = self.read(path)
        states = content["objects"]
        if len(states) != len(self._objects):
            raise RingError(
                f"rank {rank()}: {path} has {len(states)} objects, got {len(self._objects)}; pass to checkpoint() "
                "what it was made with, in the same order"
            )
        self.set_content(content, path)
        if rank() == 0:
            remarks = "".join(f"; {one}" for one in self.remarks() if one)
            print(f"Resumed after step {self.steps}, in epoch {self.epoch}, from {path}{remarks}")  # noqa: T201

    def remarks(self) -> list[str]:
        """Notes for the user about the resumed training; empty ones are not printed."""
        return []

    def set_content(self, content: dict[str, Any], path: Path | str) -> None:
        """Continue from the ``content`` of the checkpoint at ``path``."""
        self._objects = tuple(
            self.restored(one, state) for one, state in zip(self._objects, content["objects"], strict=True)
        )
        self.steps = self._written = content["steps"]
        self.epoch = content["epoch"]
        # The value of another metric says nothing of this one. Files of version 0.2 do not say which it was.
        is_same = content.get("best_of", [self._metric, self._sign]) == [self._metric, self._sign]
        self._best = content["best"] if is_same else None
        self._best_step = content.get("best_step", -1) if is_same else -1
        self._whole_best = self._best, self._best_step
        if "position" in content:  # not in files of version 0.2
            self.batch = content["batch"]
            metrics.continue_at(_of_all(content["position"], 1 / size()))

    def resume_as(self, resume: bool | str | os.PathLike[str] | None) -> None:
        """Resume from the last checkpoint of the folder, its "best", or one at a path; None: as the run was told to.

        Raises TypeError for anything else, and RingError where there is no such checkpoint, unless ``resume`` is True.
        """
        if not (resume is None or isinstance(resume, bool | os.PathLike) or (isinstance(resume, str) and resume)):
            raise TypeError(
                f"checkpoint: resume must be True, False, None, 'best' or the path of a checkpoint, got {resume!r}"
            )
        last = of_run.resume
        if not self._is_of_run or resume is not None:
            wanted = bool(last) if resume is None else resume
            last, reason = from_rank_0(lambda: self._path_of(wanted), "checkpoint to resume")
            if reason:
                raise RingError(f"rank {rank()}: {reason.removeprefix('RingError: ')}")
        elif is_url(last):
            raise RingError(f"rank {rank()}: the run to continue has its checkpoints elsewhere; pass folder={last!r}")
        if last:
            self.resume(last)
            of_run.note_use("resume")

    def _path_of(self, resume: bool | str | os.PathLike[str]) -> str:
        """The path or URL of the checkpoint to ``resume``; empty for none."""
        there = self._place.found() if resume else []
        if isinstance(resume, bool):
            return str(there[-1].path) if there else ""
        if resume == "best":
            if not (best := [one for one in there if one.best]):
                raise RingError(f"checkpoint(resume='best'): {self._place} has none that is marked as the best")
            return str(best[-1].path)
        path = os.fspath(resume).rstrip("/")
        known = [str(one.path) for one in there]
        is_local = isinstance(self._place, LocalFolder) and (Path(path).is_file() or Path(path, REST).exists())
        if path in known or is_local:
            return path
        parent, _, name = path.rpartition("/")
        if is_url(path) and step_of(name) and parent != str(self._place):
            raise RingError(f"checkpoint(resume={path!r}): it is not in {self._place}; pass folder={parent!r}")
        raise RingError(
            f"checkpoint(resume={path!r}): there is no checkpoint; pass True for the newest one, 'best', or the path "
            f"of one: {self._place} has {', '.join(known[-3:]) or 'none'}"
        )

    def tidy(self, newest: Found) -> None:
        """Remove checkpoints beyond the newest ``keep`` and the last best one.

        A failure is only reported on standard error, since ``newest`` is whole.
        """
        try:
            self._tidy(newest)
            if self._noted_in is not None:
                note_elsewhere(self._noted_in, self._place.found())
        except Exception as error:  # whatever the place raises
            print(f"older checkpoints in {self._place} stay: {cause_text(error)}", file=sys.stderr)  # noqa: T201

    def _tidy(self, newest: Found) -> None:
        for one in self._place.found():
            if one.best and one.path != newest.path:
                if one.step == newest.step:  # of an earlier training
                    self._place.remove(one)
                elif newest.best:
                    self._place.unmark_best(one)
        there = self._place.found()
        best = {one.step for one in there if one.best}
        others = [one for one in there if not one.best]
        for one in [*others[: -self._keep], *(one for one in others[-self._keep :] if one.step in best)]:
            self._place.remove(one)


def is_url(folder: str | os.PathLike[str] | None) -> bool:
    """Whether ``folder`` is a URL, such as ``s3://bucket/run``."""
    return isinstance(folder, str) and "://" in folder


def _of_all(position: metrics.Position, ranks: float) -> metrics.Position:
    """``position`` with its samples times the number of ``ranks``, since all ranks have equally many."""
    rows, batch, step, samples, epoch = position
    return rows, batch, step, samples * ranks, epoch
