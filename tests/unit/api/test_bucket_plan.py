"""The bucket plan, as literal tables."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch

from ring_notebook.api.bucket_plan import BucketPlan, ParameterSpec, plan_buckets

F32, F16 = torch.float32, torch.float16

# Registration order; sizes in elements: 64, 10, 100, 0, 7.
PARAMETERS = [
    ParameterSpec("a.weight", (8, 8), F32),
    ParameterSpec("a.bias", (10,), F32),
    ParameterSpec("b.weight", (10, 10), F16),
    ParameterSpec("b.none", (0, 4), F32),
    ParameterSpec("b.bias", (7,), F32),
]


def test_one_bucket_for_each_dtype() -> None:
    # From the last parameter to the first.
    assert plan_buckets(PARAMETERS, threshold=1 << 20) == (BucketPlan(F16, (2,)), BucketPlan(F32, (4, 3, 1, 0)))


def test_a_bucket_is_closed_before_it_exceeds_the_threshold() -> None:
    # b.bias and a.bias have 17 elements, 68 bytes; with a.weight they would have 81, 324 bytes.
    assert plan_buckets(PARAMETERS, threshold=323) == (
        BucketPlan(F16, (2,)),
        BucketPlan(F32, (4, 3, 1)),
        BucketPlan(F32, (0,)),
    )
    assert len(plan_buckets(PARAMETERS, threshold=324)) == 2


def test_threshold_zero_gives_each_gradient_its_own_bucket() -> None:
    plans = plan_buckets([PARAMETERS[0], PARAMETERS[1], PARAMETERS[4]], threshold=0)
    assert plans == (BucketPlan(F32, (2,)), BucketPlan(F32, (1,)), BucketPlan(F32, (0,)))


def test_groups_share_buckets_with_no_others_whatever_their_size() -> None:
    assert plan_buckets(PARAMETERS, threshold=1, groups=[[0, 2, 4]]) == (
        BucketPlan(F16, (2,)),
        BucketPlan(F32, (3, 1)),  # b.none has no elements, so it fits anywhere
        BucketPlan(F32, (4, 0)),
    )


def test_nothing_to_plan() -> None:
    assert plan_buckets([], threshold=100) == ()


def test_an_interrupt_changes_no_later_text_of_a_parameter() -> None:
    """Ranks compare digests of these texts."""
    text, left = repr(PARAMETERS[0]), 0

    def look(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    for moment in range(1, 20):
        left = moment
        with suppress(KeyboardInterrupt):
            try:
                sys.setprofile(look)
                repr(PARAMETERS[0])
            finally:
                sys.setprofile(None)
        assert repr(PARAMETERS[0]) == text
