"""A cell and the set-up cells before it as one script: the way from a notebook to ``ringrun`` and a batch system."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.errors import RingError
from ring_notebook.files.run_folders import RUN
from ring_notebook.frameworks import default, named, names_in
from ring_notebook.notebook.panel.report import changes_text
from ring_notebook.notebook.record.run_record import RunRecord, readable
from ring_notebook.text.parsing import parse
from ring_notebook.text.words import plural

_MARK = "Exported from a notebook by Ring Notebook"
# Names that a cell has without defining them. ``!ls`` and ``%timeit`` become calls of IPython's `get_ipython`.
_GIVEN = {"ring", "display", "get_ipython", "__name__", "__file__"}
_IPYTHON = """
import sys

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

InteractiveShell.instance(user_module=sys.modules[__name__], config=Config({"HistoryManager": {"enabled": False}}))
"""
_DISPLAY = "\nfrom IPython.display import display\n"


@dataclass(frozen=True)
class Script:
    """A script of ``cells`` cells for ``size`` ranks; the last is the cell of ``run``.

    ``missing``: names that it uses and that no cell defines.
    """

    run: str
    text: str
    size: int
    cells: int
    missing: tuple[str, ...]
    path: Path | None = None

    def __repr__(self) -> str:
        where = f" to {self.path}" if self.path else ""
        name = self.path.name if self.path else "SCRIPT.py"
        behind = f"{plural(self.cells - 1, 'set-up cell')} and " if self.cells > 1 else ""
        lines = [f"Wrote {behind}the cell of run {self.run}{where}. Run it: ringrun -np {self.size} python {name}"]
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
    return Script(made.run, made.text, made.size, made.cells, made.missing, target)


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
    parts = []
    for one in (*before, record):
        title = f"{one.title}{', a set-up cell' if one is not record else ''}"
        if one is record:
            title += "".join(
                f"\n# changed while it ran, not in this script: {line}" for line in changes_text(one.view())
            )
        parts.append(f"# %% {title}\n{TransformerManager().transform_cell(one.source).strip()}\n")
    body = "\n".join(parts)
    tree = parse(body)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    head = f'"""{_MARK}, run {record.run}.\n\n    ringrun -np {record.size} python {name}\n"""\n'
    head += "".join(f"\n{ast.unparse(node)}\n" for node in futures)
    for node in reversed(futures):  # they have to come first
        lines = body.split("\n")
        lines[node.lineno - 1] = f"# {lines[node.lineno - 1]}"
        body = "\n".join(lines)
    framework = named(names_in(tree)) or default()
    horovod = any(one.options.get("horovod") for one in (*before, record))
    head += "\nimport ring_notebook" * horovod + f"\nimport {framework.face} as ring\n"
    head += "\nring_notebook.as_horovod()\n" * horovod
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    head += (_IPYTHON if "get_ipython" in used else "") + (_DISPLAY if "display" in used else "")
    head += "\nring.init()\n" + (framework.gpu_setup if framework.gpu_word and framework.gpu_word in body else "")
    text = f"{head}\n{body}"
    compile(text, name, "exec")
    return Script(record.title, text, record.size, len(parts), tuple(_missing(tree)))


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
