"""Numbers, names and ranks in sentences, and rows of words in columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

LONGEST = 24  # characters of a name above a chart or a column

TRANSPORTS = {"host": "GPU tensors through CPU memory", "nccl": "GPU tensors by NCCL"}
"""What moves tensors on GPUs between the ranks of a run, by the name that the core gives it."""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows, all of the same length, as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plural(count: int, thing: str) -> str:
    """``1 engine``, ``2 engines``."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def size_text(count: int) -> str:
    """Bytes for a reader: ``3.5 KiB``, ``1,024.0 MiB``."""
    return f"{count / (1 << 20):,.1f} MiB" if count >= 1 << 18 else f"{count / 1024:,.1f} KiB"


def rate_text(rate: float) -> str:
    """Bytes per second of a network in the units of its cards."""
    return f"{8e-9 * rate:.3g} Gbit/s" if rate >= 1e9 / 8 else f"{8e-6 * rate:.3g} Mbit/s"


GATES = ("dist.", "jax.")
"""Prefixes of the names of barriers that stand for operations of PyTorch's and JAX's own runtimes."""


def is_gate(kind: str, name: str) -> bool:
    """Whether an operation stands for one of another runtime, and has its name."""
    return kind == "barrier" and name.startswith(GATES)


def operation_title(kind: str, name: str) -> str:
    """``allreduce 'grad'``, or ``dist.all_reduce sum float32 [3]`` for the barrier before an operation of PyTorch."""
    if is_gate(kind, name):
        return name
    return f"{kind} '{name}'" if name else kind


def first_characters(text: str, most: int) -> str:
    """The text, cut to ``most`` characters, the last of them an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def first_names(names: Sequence[str], most: int = 8) -> str:
    """The names with commas; only the first of very many, with a count: ``loss, accuracy and 98 more``."""
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


def shortened(names: Collection[str]) -> dict[str, str]:
    """A shorter name for each: long names without the path ends that all share, or without their middle."""
    long = {name: name.split("/") for name in names if len(name) > LONGEST}
    first = _shared([path[:-1] for path in long.values()])
    last = _shared([path[:first:-1] for path in long.values()])
    short = dict(zip(names, names, strict=True))
    for name, path in long.items():
        left = "/".join(["…"] * bool(first) + path[first : len(path) - last] + ["…"] * bool(last))
        short[name] = left if len(left) <= LONGEST else f"{left[: LONGEST // 2 - 1]}…{left[-LONGEST // 2 :]}"
    return short


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """The number of elements at the start that all paths share."""
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*paths, strict=False))
    return sum(1 for _ in alike) if len(paths) > 1 else 0
