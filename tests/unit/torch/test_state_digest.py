"""Digests of the values that ranks share: in shares, which together see every element."""

from __future__ import annotations

import pytest
import torch

from ring_notebook.torch.steps.state_digest import SHARES, marks

WORDS_OF_SHARES = SHARES * 512


@pytest.mark.parametrize(
    ("dtype", "extra"),
    [(torch.float32, 0), (torch.float32, 3000), (torch.float16, 1), (torch.uint8, 1), (torch.complex128, 3000)],
)
def test_one_share_sees_an_element(dtype: torch.dtype, extra: int) -> None:
    n = 2 * WORDS_OF_SHARES * 8 // dtype.itemsize + extra
    before = torch.arange(n, dtype=torch.int64).to(dtype)
    seen = set()
    for place in (0, n // 3, n // 2 + 1, n - 1, *range(0, n, n // 40)):
        after = before.clone()
        after[place] = 77 if place != 77 else 78
        assert marks({"w": before}) != marks({"w": after})
        (share,) = (k for k in range(SHARES) if marks({"w": before}, k) != marks({"w": after}, k))
        seen.add(share)
    assert len(seen) > SHARES // 2


def test_a_small_tensor_and_a_number_are_in_the_first_share() -> None:
    before, after = {"w": torch.zeros(7), "lr": 0.1}, {"w": torch.ones(7), "lr": 0.1}
    assert marks(before, 0) != marks(after, 0)
    assert marks(before, 1) == marks(after, 1) == {"lr": "0.1"}


def test_a_tensor_that_is_not_contiguous_has_the_sum_of_its_values() -> None:
    tensor = torch.arange(4 * WORDS_OF_SHARES, dtype=torch.float64).reshape(4, -1).t()
    assert [marks({"w": tensor}, k) for k in range(SHARES)] == [
        marks({"w": tensor.contiguous()}, k) for k in range(SHARES)
    ]
