"""Sums in one order for any number of ranks: a binary tree over logical ranks.

Node ``(level, index)`` of the tree is the sum of the existing leaves from ``index * 2**level`` to
``(index + 1) * 2**level - 1``. Its parts are nodes ``2 * index`` and, if it exists, ``2 * index + 1`` of the level
below. A rank adds its consecutive leaves as far as it can, the ranks exchange these nodes, and each adds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class OrderedSum(Generic[T]):
    """The sum of leaves ``first``, ``first + 1``, ... of a tree of ``number`` leaves, by ``add`` of two parts."""

    def __init__(self, number: int, first: int, add: Callable[[T, T], T]) -> None:
        self._number, self._add = number, add
        self.next = first
        """The index of the next leaf."""
        self.nodes: list[tuple[int, int, T]] = []
        """Nodes that need other leaves before they can be added further."""

    def push(self, leaf: T) -> None:
        """Add the next leaf."""
        self.push_node(0, self.next, leaf)
        self.next += 1

    def push_node(self, level: int, index: int, value: T) -> None:
        """Add a node that follows all earlier ones."""
        while True:
            width = -(-self._number >> level)  # nodes of this level
            if width == 1:
                break
            if index % 2 == 0 and index == width - 1:  # it has no other part
                level, index = level + 1, index // 2
                continue
            if index % 2 == 0 or not self.nodes or self.nodes[-1][:2] != (level, index - 1):
                break
            value = self._add(self.nodes.pop()[2], value)
            level, index = level + 1, index // 2
        self.nodes.append((level, index, value))

    def with_leaf(self, leaf: T, add: Callable[[T, T], T]) -> OrderedSum[T]:
        """A copy with one more leaf; this sum stays unchanged if ``add`` does not change its arguments."""
        more: OrderedSum[T] = OrderedSum(self._number, self.next, add)
        more.nodes = list(self.nodes)
        more.push(leaf)
        return more


def nodes_of(number: int, first: int, count: int) -> list[tuple[int, int]]:
    """The nodes of an `OrderedSum` after leaves ``first`` to ``first + count - 1``."""
    found: OrderedSum[None] = OrderedSum(number, first, lambda *_: None)
    for _ in range(count):
        found.push(None)
    return [(level, index) for level, index, _ in found.nodes]


def total(number: int, nodes: Iterable[tuple[int, int, T]], add: Callable[[T, T], T]) -> T:
    """The sum of all leaves, from the nodes of all ranks in rank order."""
    whole: OrderedSum[T] = OrderedSum(number, 0, add)
    for level, index, value in nodes:
        whole.push_node(level, index, value)
    [(_, _, value)] = whole.nodes
    return value
