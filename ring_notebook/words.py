"""Numbers, names and ranks in sentences, and rows of words in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows, all of the same length, as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plural(count: int, thing: str) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def first_names(names: Sequence[str], most: int = 8) -> str:
    """The names with commas; of very many only the first, with a count: ``loss, accuracy and 98 more``."""
    more = len(names) - most
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:most])} and {more:,} more"


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in order, runs of them joined: ``0-3, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def ranks(numbers: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0-3, 7``."""
    listed = sorted(set(numbers))
    return f"rank{'s' * (len(listed) != 1)} {rank_list(listed)}"
