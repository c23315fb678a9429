"""Data-parallel lint: why the ranks of a cell train apart or do the same work twice, and the line to change.

Hints come from two sources: the calls of the cell (`ring_notebook.frameworks`), and what the ranks really did.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from IPython.core.inputtransformer2 import TransformerManager

from ring_notebook.frameworks import CellCalls, Hint, default, named, names_in, with_code_of_magics
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.style import with_code
from ring_notebook.protocol.records import MEDIA
from ring_notebook.text.parsing import parse
from ring_notebook.text.words import rank_list

_SAME_LINES = 5  # equal lines of all ranks before there is a hint


class Lint:
    """The hints of one cell.

    ``first_line`` is the number of the first line of ``source`` in the notebook. With ``gpus`` each rank has one.
    """

    def __init__(self, source: str, first_line: int = 1, *, gpus: bool = False) -> None:
        try:
            tree = parse("\n" * (first_line - 1) + TransformerManager().transform_cell(source))
        except SyntaxError:  # the ranks report it
            tree = ast.Module([], [])
        last = tree.body[-1] if tree.body else None
        self._has_value = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
        tree = with_code_of_magics(tree)
        self._framework = named(names_in(tree)) or default()
        self._cell = CellCalls(tree, gpus)
        self._static = tuple(self._framework.hints(self._cell))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the cell logs itself, by name; "" for those whose names it does not show.

        Functions that it calls may log others. `track` logs samples, unless it counts a range.
        """
        found: dict[str, None] = {}
        for call in self._cell.calls:
            if call.name == "log":
                names = (one.arg or "" for one in call.node.keywords)
                found |= dict.fromkeys(name for name in names if name not in ("step", "units", *MEDIA))
            elif call.name == "track" and not ast.unparse(call.node).partition("(")[2].startswith("range("):
                found["samples"] = None
        return tuple(found)

    def hints(self, view: RunView) -> tuple[Hint, ...]:
        """The hints for the run so far; none for a single rank.

        None for a cell that failed before its first step either: its error says what is wrong.
        """
        if view.size == 1 or (not view.names and any(rank.ended and rank.ended.status != "ok" for rank in view.ranks)):
            return ()
        return (*self._static, *self._of_steps(view), *self._of_output(view))

    def _of_steps(self, view: RunView) -> Iterator[Hint]:
        steps = {rank.rank: rank.step for rank in view.ranks}
        if not all(rank.ended and rank.ended.status == "ok" for rank in view.ranks) or len(set(steps.values())) == 1:
            return
        if any(len(by_rank) < view.size for by_rank in view.curves.values()):
            return  # each call of log is a step, and not all ranks log the same
        least, most = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        loader = self._cell.first(self._framework.loaders)
        yield Hint(
            loader.line if loader else 0,
            f"rank {least} ended at step {steps[least]} and rank {most} at step {steps[most]}: give every rank the "
            "same number of batches, or some ranks average gradients with no other rank",
        )

    def _of_output(self, view: RunView) -> Iterator[Hint]:
        last = {piece.rank: piece for piece in view.output}
        values = [piece for piece in last.values() if piece.block and self._has_value]  # shown, not printed
        printed = (piece for piece in view.output if piece not in values)
        count = Counter((piece.rank, line) for piece in printed for line in piece.text.splitlines() if line.strip())
        alike = sum(
            min(count[rank, line] for rank in range(view.size)) for line in {line for rank, line in count if rank == 0}
        )
        call = next((call for call in self._cell.calls if call.name == "print" and not call.guarded), None)
        if alike >= _SAME_LINES and call:
            ranks = rank_list(range(view.size))
            lines = "lines" if view.dropped_lines else f"{alike} lines"  # no number if old lines were dropped
            yield Hint(call.line, f"ranks {ranks} print the same {lines}: `if ring.rank() == 0:` makes it one")


def text(hint: Hint) -> str:
    return f"Hint, line {hint.line}: {hint.text}." if hint.line else f"Hint: {hint.text}."


def html(hints: tuple[Hint, ...]) -> str:
    """The hints for a page; text between backquotes is code."""
    return "".join(f"<div class='ring-notice ring-hint'>{with_code(text(hint))}</div>" for hint in hints)
