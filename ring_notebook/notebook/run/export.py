"""A cell and the set-up cells before it as one script: the way from a notebook to ``ringrun`` and a batch system."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.errors import RingError
from ring_notebook.files.run_folders import RUN
from ring_notebook.frameworks import default, named, names_in, with_code_of_magics
from ring_notebook.notebook.panel.report import changes_text
from ring_notebook.notebook.record.run_record import RunRecord, readable
from ring_notebook.text.parsing import parse
from ring_notebook.text.words import plural, ranks

_MARK = "Exported from a notebook by Ring Notebook"
# Names that a cell has without defining them. ``!ls`` and ``%timeit`` become calls of IPython's `get_ipython`.
_GIVEN = {"ring", "display", "get_ipython", "__name__", "__file__"}
_IPYTHON = """
import sys

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

InteractiveShell.instance(user_module=sys.modules[__name__], config=Config({"HistoryManager": {"enabled": False}}))
"""
_OPTIONS = "ring_notebook.core.run_options"
_DISPLAY = "\nfrom IPython.display import display\n"


@dataclass(frozen=True)
class Script:
    """A script of ``cells`` cells for ``size`` ranks; the last is the cell of ``run``.

    ``missing``: names that it uses and that no cell defines. ``unlike``: what a cell of it had in the notebook only.
    """

    run: str
    text: str
    size: int
    cells: int
    missing: tuple[str, ...]
    unlike: tuple[str, ...] = ()
    path: Path | None = None

    def __repr__(self) -> str:
        where = f" to {self.path}" if self.path else ""
        name = self.path.name if self.path else "SCRIPT.py"
        behind = f"{plural(self.cells - 1, 'set-up cell')} and " if self.cells > 1 else ""
        lines = [f"Wrote {behind}the cell of run {self.run}{where}. Run it: ringrun -np {self.size} python {name}"]
        if self.unlike:
            lines.append(f"Not as in the notebook: {'; '.join(self.unlike)}.")
        if self.missing:
            lines.append(
                f"No cell of it makes {', '.join(self.missing)}: mark the one that does "
                "`%%ringtrain --setup`, run it and this one again, and export again."
            )
        return "\n".join(lines)


def export(record: RunRecord, path: str | Path) -> Script:
    """Write the cell of a run, after the set-up cells that ran before it in the same cluster, to ``path``.

    Raises RingError when ``path`` exists and export did not write it, and OSError when it cannot be written.
    """
    target = Path(path)
    _check(target)
    made = script(record, set_up_before(record), target.name)
    target.write_text(made.text, encoding="utf-8")
    return replace(made, path=target)


def write_job(path: Path, text: str) -> str:
    """Write the script of a batch job that runs an exported script; returns how to submit it. Raises as `export`."""
    first, _, rest = text.partition("\n")
    _check(path)
    path.write_text(f"{first}\n# {_MARK}\n{rest}", encoding="utf-8")
    return f"Wrote {path}, the batch job that runs it."


def _check(target: Path) -> None:
    if target.exists() and _MARK not in target.read_text(errors="replace")[:200]:
        raise RingError(f"{target} exists and was not exported from a notebook; choose another name")


def script(record: RunRecord, before: Sequence[RunRecord], name: str) -> Script:
    """The script that runs the cells of the runs ``before``, then the cell of ``record``."""
    parts, unlike = [], []
    options = {"sync_every": 1, "logical": 0}  # those of a script
    for one in (*before, record):
        title = f"{one.title}{', a set-up cell' if one is not record else ''}"
        for line in _unlike(one, record):
            title += f"\n# {line}"
            unlike.append(f"{one.title} {line}")
        if one is record:
            title += "".join(
                f"\n# changed while it ran, not in this script: {line}" for line in changes_text(one.view())
            )
        own = {name: one.options.get(name, plain) for name, plain in options.items()}
        set_here = _setting(options, own)
        options = own
        parts.append(f"# %% {title}\n{set_here}{TransformerManager().transform_cell(one.source).strip()}\n")
    body = "\n".join(parts)
    tree = parse(body)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    head = f'"""{_MARK}, run {record.run}.\n\n    ringrun -np {record.size} python {name}\n"""\n'
    head += "".join(f"\n{ast.unparse(node)}\n" for node in futures)
    for node in reversed(futures):  # they have to come first
        lines = body.split("\n")
        lines[node.lineno - 1] = f"# {lines[node.lineno - 1]}"
        body = "\n".join(lines)
    tree = with_code_of_magics(tree)
    framework = named(names_in(tree)) or default()
    horovod = any(one.options.get("horovod") for one in (*before, record))
    head += "\nimport ring_notebook" * horovod + f"\nimport {framework.face} as ring\n"
    head += "\nring_notebook.as_horovod()\n" * horovod
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    head += (_IPYTHON if "get_ipython" in used else "") + (_DISPLAY if "display" in used else "")
    head += "\nring.init()\n" + (framework.gpu_setup if framework.gpu_word and framework.gpu_word in body else "")
    text = f"{head}\n{body}"
    compile(text, name, "exec")
    return Script(record.title, text, record.size, len(parts), tuple(_missing(tree)), tuple(unlike))


def _setting(before: Mapping[str, int], own: Mapping[str, int]) -> str:
    """The lines that change the options of the training, as a cell before has left them, to a cell's ``own``."""
    changed = {name: value for name, value in own.items() if value != before[name]}
    lines = [f"import {_OPTIONS}\n"] if changed else []
    for name, value in changed.items():
        flag = f"  # %%ringtrain --{name.replace('_', '-')} {value}" if value else ""
        lines.append(f"{_OPTIONS}.of_run.{name} = {value}{flag}\n")
    return "".join(lines)


def _unlike(one: RunRecord, last: RunRecord) -> Iterator[str]:
    """What a cell of the script had in the notebook and not here; ``last`` is the cell that trained."""
    if any(one.options.get(name) for name in ("n", "ranks")) and not (own := _ranks(one)) >= _ranks(last):
        yield f"ran on {ranks(own)} only, here on all ranks"
    if knobs := one.options.get("knobs"):
        yield f"began with {', '.join(f'{name} = {value!r}' for name, value in knobs.items())}, not in this script"


def _ranks(one: RunRecord) -> set[int]:
    """The ranks of its cluster on which a cell ran."""
    return set(one.options.get("ranks") or range(one.size))


def set_up_cells(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The runs that ended well, in order of time; of a cell that ran several times, the last version.

    This stands at the cell's first place, because cells after it may need it. An edited cell is recognized by the
    ``cell_id`` of its options, if the notebook sends one.
    """
    return list({_cell(run): run for run in runs if run.status == "ok"}.values())


def _cell(record: RunRecord) -> str:
    return str(record.options.get("cell_id") or record.source)


def set_up_runs(runs: Path, cluster: str) -> list[RunRecord]:
    """The runs of set-up cells in the folder ``runs`` that the cluster of this name has executed, in order of time."""
    return [
        RunRecord(directory, about)
        for directory, about in readable(sorted(file.parent for file in runs.glob(f"*/{RUN}")))
        if about["environment"].get("cluster") == cluster and about["options"].get("setup")
    ]


def set_up_before(record: RunRecord) -> list[RunRecord]:
    """The set-up cells that ran in the cluster of ``record`` before it."""
    runs = set_up_runs(record.directory.parent, record.environment.get("cluster", ""))
    return set_up_cells(one for one in runs if one.started < record.started and _cell(one) != _cell(record))


def _missing(tree: ast.Module) -> Iterator[str]:
    """The names that are read and never defined, in order of appearance."""
    made = _GIVEN | set(dir(builtins))
    read: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read.setdefault(node.id)
            else:
                made.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made.update((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            made.add(node.name)
    if "*" not in made:  # `from module import *` may define any name
        yield from (name for name in read if name not in made)
