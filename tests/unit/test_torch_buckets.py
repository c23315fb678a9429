"""The bucket plan, as literal tables."""

from __future__ import annotations

import torch

from ring_notebook.torch.buckets import BucketPlan, ParameterSpec, Slot, plan_buckets

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
    # From the last parameter to the first, each at a multiple of 64 bytes: 16 float32 or 32 float16.
    assert plan_buckets(PARAMETERS, threshold=1 << 20) == (
        BucketPlan(F16, (Slot(2, 0),), flags=100),
        BucketPlan(F32, (Slot(4, 0), Slot(3, 16), Slot(1, 16), Slot(0, 32)), flags=96),
    )


def test_a_bucket_is_closed_before_it_exceeds_the_threshold() -> None:
    # b.bias and a.bias end at element 26, 104 bytes; with a.weight they would at 96 * 4 = 384.
    assert plan_buckets(PARAMETERS, threshold=383) == (
        BucketPlan(F16, (Slot(2, 0),), flags=100),
        BucketPlan(F32, (Slot(4, 0), Slot(3, 16), Slot(1, 16)), flags=26),
        BucketPlan(F32, (Slot(0, 0),), flags=64),
    )
    assert len(plan_buckets(PARAMETERS, threshold=384)) == 2


def test_threshold_zero_gives_each_gradient_its_own_bucket() -> None:
    plans = plan_buckets([PARAMETERS[0], PARAMETERS[1], PARAMETERS[4]], threshold=0)
    assert plans == (
        BucketPlan(F32, (Slot(2, 0),), flags=7),
        BucketPlan(F32, (Slot(1, 0),), flags=10),
        BucketPlan(F32, (Slot(0, 0),), flags=64),
    )


def test_groups_share_buckets_with_no_others_whatever_their_size() -> None:
    assert plan_buckets(PARAMETERS, threshold=1, groups=[[0, 2, 4]]) == (
        BucketPlan(F16, (Slot(2, 0),), flags=100),
        BucketPlan(F32, (Slot(3, 0), Slot(1, 0)), flags=10),  # no elements, so it fits anywhere
        BucketPlan(F32, (Slot(4, 0), Slot(0, 16)), flags=80),
    )


def test_count_has_room_for_a_flag_for_each_gradient() -> None:
    assert BucketPlan(F32, (Slot(1, 0), Slot(0, 16)), flags=20).count == 22


def test_nothing_to_plan() -> None:
    assert plan_buckets([], threshold=100) == ()
