"""A cell as a kernel sends it to the engines that execute it, and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from ring_notebook.text.line_options import Option, count, duration, name_list, rank_numbers, step_list


@dataclass(frozen=True, slots=True)
class CellOptions:
    """The options of one cell. Fields with flags are those of ``%%ringtrain``."""

    n: Annotated[int | None, Option("-n N", "run on ranks 0 to N-1; by default on all", count, exclusive=True)] = None
    ranks: Annotated[
        Sequence[int] | None,
        Option("-t, --ranks 0,2-3", "run on these ranks, which count from 0 in the run", rank_numbers, exclusive=True),
    ] = None
    name: Annotated[str, Option("--name NAME", "name of the run")] = ""
    timeout: Annotated[float, Option("--timeout 20m", "stop the run after this time", duration)] = 0.0
    plot: Annotated[
        Sequence[str], Option("--plot loss,acc", "metrics to chart; loss+val_loss: both in one", name_list)
    ] = ()
    timeline: Annotated[bool, Option("--timeline", "record what each rank does when, and show it at the end")] = False
    horovod: Annotated[bool, Option("--horovod", "`import horovod` means Ring Notebook in the cell")] = False
    background: Annotated[bool, Option("--background", "return at once; see `%ring queue`, `%ring stop --runs`")] = (
        False
    )
    setup: Annotated[bool, Option("--setup", "run again by `%ring heal` and `%ring restart --rerun`")] = False
    resume: Annotated[bool, Option("--resume", "continue from the last checkpoint (`ring.checkpoint`)")] = False
    replay: Annotated[str, Option("--replay RUN", "make the changes of knobs of that run again, at the same steps")] = (
        ""
    )
    pause_at: Annotated[
        Sequence[int], Option("--pause-at 100,200", "pause all ranks after these steps", step_list)
    ] = ()
    snapshot: Annotated[
        float, Option("--snapshot 10min", "save all variables so often (`%ring snapshots`)", duration)
    ] = 0.0
    sync_every: Annotated[
        int, Option("--sync-every N", "let each rank step alone, and sync the weights every N steps", count)
    ] = 1
    logical: Annotated[int, Option("--logical L", "train as L ranks would, on any number of ranks up to L", count)] = 0
    first_line: Annotated[int, Option("--first-line N", read=int)] = 2
    """The number that errors give to the first line of the cell; `%ring default on` sends cells without a magic."""
    cell_id: str = ""
    """The front end's id of the cell; empty if it has none. An edited set-up cell replaces the one of the same id."""
    one_rank: float = 0.0
    """The samples/s that the same cell has been measured to reach on one rank."""
    branch: Mapping[str, Any] = field(default_factory=dict)
    """Of a run that begins where another one was: ``run``, the other's id; ``of``, its name and step; the place in the
    cell."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Values of knobs from the beginning, in place of the first ones that the cell or a snapshot gives them."""
    repeats: str = ""
    """The id of a run of logical ranks whose gradients this one is to have."""
    until: int = -1
    """The step, from 0, before which logical ranks stop in pdb; -1: none."""
    who: str = ""
    """Who has asked for the run, where that was not its notebook."""
    warmup: int = 1
    """Steps after which the account of the ranks' time begins."""

    def kept(self) -> dict[str, Any]:
        """The options as JSON to keep with the run, without ``background``, which holds for one time only."""
        made = {name: value for name, value in asdict(self).items() if name != "background"}
        return made | {"ranks": None if self.ranks is None else [*map(int, self.ranks)]}  # from a range or an array

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> CellOptions:
        """The options of a run; names that another version has kept are left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in known})


@dataclass(frozen=True, slots=True)
class CellRequest:
    """The cell of ``run``, to be executed in a new ``generation`` over ``engines``, its ranks in this order."""

    run: str
    generation: int
    engines: list[int]
    source: str
    options: CellOptions
    only: Sequence[int] = ()
    """If there are any, these engines execute the cell, and the others leave the generation at once: rank and size are
    those of all, and a collective raises."""
    lost: Sequence[int] = ()
    """The engines of the cluster that have died."""
    checkpoints: str = ""
    """The folder for the checkpoints of the run."""
    resume: str = ""
    """The checkpoint that it resumes from, or empty."""
    gradients: bytes = b""
    """Messages with the marks of the gradients that its logical ranks are to have."""
    changes: Sequence[Mapping[str, Any]] = ()
    """Changes of knobs of another run, to be repeated at the same points, and pauses at known points."""
