"""Compression.auto: which bucket travels how, by made-up links and backward passes."""

from __future__ import annotations

import pytest

from ring_notebook.torch.optimizer.link_choice import Cost, Load, choose

MILLION = 1_000_000


def link(mbit: float, *, handling: float = 1e-9) -> dict[str, Cost]:
    """What averages cost over a link of so many Mbit/s; numbers as bytes take time to pack too."""
    each = 8 / (mbit * 1e6)
    return {
        "none": Cost(1e-3, 4 * each),
        "bf16": Cost(1e-3, 2 * each + handling / 2),
        "int8": Cost(2e-3, each + handling),
    }


def test_what_hides_behind_backward_travels_as_it_is() -> None:
    loads = [Load(MILLION, 0.2), Load(MILLION, 0.1), Load(1000, 0.0)]
    assert choose(loads, link(1000), 0.3) == ["none"] * 3


def test_a_slow_link_sends_bytes() -> None:
    loads = [Load(MILLION, 0.2), Load(MILLION, 0.1), Load(MILLION, 0.0)]
    assert choose(loads, link(10), 0.3) == ["int8"] * 3


def test_each_bucket_takes_the_first_that_is_there_before_the_next() -> None:
    """Of a million numbers 320 ms as they are, 160 as bf16, 80 as bytes; the last has nothing to hide behind."""
    loads = [Load(MILLION, 0.0), Load(MILLION, 0.2), Load(MILLION, 0.6)]
    assert choose(loads, link(100, handling=0), 0.8) == ["int8", "bf16", "none"]


def test_a_link_that_is_busy_makes_the_next_bucket_late() -> None:
    alone = choose([Load(MILLION, 0.25), Load(10, 0.0)], link(100, handling=0), 0.5)
    behind = choose([Load(2 * MILLION, 0.26), Load(MILLION, 0.25), Load(10, 0.0)], link(100, handling=0), 0.5)
    assert alone[0] == "bf16"
    assert behind[:2] == ["int8", "int8"]


def test_on_a_fast_link_packing_takes_longer_than_sending() -> None:
    """Nothing to hide behind, as where buckets travel when backward has ended: the fastest."""
    fast = {"none": Cost(0, 1e-9), "bf16": Cost(0, 1.1e-9), "int8": Cost(0, 3e-9)}
    assert choose([Load(MILLION, 0.0), Load(MILLION, 0.0)], fast, 1e-3) == ["none", "none"]
    assert choose([Load(MILLION, 0.0), Load(MILLION, 0.0)], link(100), 1e-3) == ["int8", "int8"]


def test_what_nobody_notices_stays_exact() -> None:
    """One in twenty of a backward pass, over all buckets."""
    assert choose([Load(100, 0.0)], {name: Cost(0.004, 0) for name in ("none", "bf16", "int8")}, 0.1) == ["none"]
    assert choose([], link(100), 0.1) == []


@pytest.mark.parametrize("backward", [0.0, 0.1])
def test_a_pass_without_gradients_has_no_time(backward: float) -> None:
    assert choose([Load(0, 0.0)], link(100), backward) == ["none"]
