"""Whether runs have had the same gradients and logged the same numbers, bit by bit, and where they part."""

from __future__ import annotations

from collections.abc import Iterable

from ring_notebook.analysis.equal_gradients import compared_gradients, marks_of
from ring_notebook.notebook.record.logged_rows import MetricRow
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.record.run_view import LOGICAL_RANK
from ring_notebook.text.words import plural

__all__ = ["compared"]

_Numbers = dict[tuple[int, int], float]


def compared(before: RunRecord, now: RunRecord, called: tuple[str, str], is_part: bool = False) -> str:
    """Which metrics of two runs are equal, and for each other metric the first values that differ, as text.

    ``called`` names the two runs in it. Rows are compared by step and logical rank, without logical ranks by step and
    rank. If both runs have logical ranks, but different numbers of ranks, metrics that no logical rank logged are
    compared for rank 0. Metrics that measure time differ in any two runs. The gradients of logical ranks come first,
    because metrics follow from them. With ``is_part``, ``now`` has stopped early: later rows are left out.
    """
    rows = before.metrics(), now.metrics()
    of_all = before.size == now.size or not all(LOGICAL_RANK in one.names for one in rows)
    one, other = (_by_metric(each, of_all) for each in rows)
    if is_part:
        one = {
            name: {key: value for key, value in one[name].items() if key in other[name]} for name in other.keys() & one
        }
    equal, parted = [], []
    for name in sorted({*one, *other}):
        first, second = one.get(name, {}), other.get(name, {})
        # As text, so that NaN equals NaN.
        different = sorted(key for key in {*first, *second} if repr(first.get(key)) != repr(second.get(key)))
        if different:
            step, rank = different[0]
            values = (
                f"{numbers.get(different[0], 'nothing')} in {run}"
                for numbers, run in zip((first, second), called, strict=True)
            )
            parted.append(f"{name} differs first at step {step} of rank {rank}: {', '.join(values)}")
        else:
            equal.append(f"{plural(len(first), 'value')} of {name}")
    gradients = compared_gradients(marks_of(before.gradients()), marks_of(now.gradients()))
    said = [gradients] if gradients else []
    said += [f"Equal bit by bit: {', '.join(equal)}."] if equal else []
    said += [f"Not equal: {one}." for one in parted]
    return "\n".join(said) or "Neither run has logged a number."


def _by_metric(rows: Iterable[MetricRow], of_all: bool) -> dict[str, _Numbers]:
    """The values of each metric by step and by logical rank, else by rank.

    Without ``of_all``, rows that no logical rank has logged are left out except rank 0's.
    """
    found: dict[str, _Numbers] = {}
    for row in rows:
        rank = int(row.values.get(LOGICAL_RANK, row.rank))
        if not of_all and row.rank and LOGICAL_RANK not in row.values:
            continue
        for name, value in row.values.items():
            if name != LOGICAL_RANK:
                found.setdefault(name, {})[row.step, rank] = value
    return found
