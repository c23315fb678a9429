"""The tree of an ordered sum, as text, for any division of its leaves among ranks."""

from __future__ import annotations

import pytest

from ring_notebook.torch.optimizer.ordered_sum import OrderedSum, nodes_of, total

TREES = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    4: "((0+1)+(2+3))",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
    12: "((((0+1)+(2+3))+((4+5)+(6+7)))+((8+9)+(10+11)))",
}


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


@pytest.mark.parametrize("number", TREES)
def test_the_tree_is_the_same_for_any_number_of_ranks(number: int) -> None:
    for ranks in (one for one in range(1, number + 1) if number % one == 0):
        turns, nodes = number // ranks, []
        for rank in range(ranks):
            own: OrderedSum[str] = OrderedSum(number, rank * turns, add)
            for leaf in range(rank * turns, (rank + 1) * turns - 1):
                own.push(str(leaf))
            before = list(own.nodes)
            whole = own.with_leaf(str((rank + 1) * turns - 1), add)
            assert own.nodes == before
            assert [node[:2] for node in whole.nodes] == nodes_of(number, rank * turns, turns)
            nodes += whole.nodes
        assert total(number, nodes, add) == TREES[number], ranks


@pytest.mark.parametrize(
    ("number", "first", "count", "nodes"),
    [
        (8, 0, 8, [(3, 0)]),
        (8, 4, 4, [(2, 1)]),
        (6, 0, 3, [(1, 0), (0, 2)]),
        (6, 3, 3, [(0, 3), (2, 1)]),  # leaves 4 and 5 have no other part above them
        (6, 2, 2, [(1, 1)]),
        (12, 3, 3, [(0, 3), (1, 2)]),
    ],
)
def test_what_a_rank_sends(number: int, first: int, count: int, nodes: list[tuple[int, int]]) -> None:
    assert nodes_of(number, first, count) == nodes
