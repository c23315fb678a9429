"""Damages valid messages: bytes flipped, cut, doubled and inserted, JSON values replaced; a seed repeats it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["damaged", "with_other_values"]

# What stands in the place of a JSON value: each of them has broken a reader somewhere.
HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1 << 80, 1e308, float("nan"), float("inf")),
    *("", "\0", "\ud800", "../../x", "<script>", "x" * 5000),
    *([], [[]], {}, {"": None}, ["a", 1], [None] * 4),
]
CHUNKS = [b"\0", b"\xff" * 8, b"\n", b"\t", b" ", b"[" * 5000, b"9" * 5000, b"\xf0\x9f", b"{}", b"null", b"-1", b"nan"]


def damaged(valid: bytes, count: int, seed: int) -> Iterator[bytes]:
    """``count`` versions of ``valid`` with one to four injuries each."""
    source = random.Random(seed)
    for _ in range(count):
        data = bytearray(valid)
        for _ in range(source.randint(1, 4)):
            _injure(data, source)
        yield bytes(data)


def _injure(data: bytearray, source: random.Random) -> None:
    at = source.randrange(len(data) + 1)
    end = min(len(data), at + source.randint(1, 40))
    kind = source.randrange(5)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << source.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at:end]
    elif kind == 3:
        data[at:at] = data[at:end]
    else:
        data[at:at] = source.choice(CHUNKS)


def with_other_values(valid: Any) -> Iterator[Any]:
    """``valid`` (of JSON) with each of its values, at any depth, replaced by each hostile one, and without it."""
    for value in HOSTILE:
        yield json.loads(json.dumps(value))
    if isinstance(valid, dict):
        for key in valid:
            yield {name: value for name, value in valid.items() if name != key}
            yield from ({**valid, key: other} for other in with_other_values(valid[key]))
        yield {**valid, "surplus": 1}
    elif isinstance(valid, list):
        for index in range(len(valid)):
            yield from ([*valid[:index], other, *valid[index + 1 :]] for other in with_other_values(valid[index]))
