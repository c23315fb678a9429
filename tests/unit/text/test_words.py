"""Words in sentences and columns."""

from __future__ import annotations

import pytest

from ring_notebook.text.words import LONGEST, operation_title, shortened


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["loss", "grad/norm"], ["loss", "grad/norm"]),
        (["encoder/block_0/attention/norm", "encoder/block_1/attention/norm"], ["…/block_0/…", "…/block_1/…"]),
        (["encoder/block_0/attention/norm", "loss"], ["encoder/blo…tention/norm", "loss"]),
        (
            ["first_name_without_a_path", "other_name_without_a_path"],
            ["first_name_…thout_a_path", "other_name_…thout_a_path"],
        ),
        (["a/deep/path/to/one/metric/x", "a/deep/path/to/one/metric"], ["…/metric/x", "…/metric"]),
    ],
)
def test_long_names_are_shown_by_what_differs(names: list[str], short: list[str]) -> None:
    assert list(shortened(names).values()) == short
    assert all(len(one) <= LONGEST for one in short)


@pytest.mark.parametrize(
    ("kind", "name", "title"),
    [
        ("allreduce", "grad", "allreduce 'grad'"),
        ("barrier", "", "barrier"),
        ("barrier", "end of epoch", "barrier 'end of epoch'"),
        ("barrier", "dist.all_reduce sum float32 [3]", "dist.all_reduce sum float32 [3]"),
    ],
)
def test_the_barrier_before_an_operation_of_torch_is_named_as_that(kind: str, name: str, title: str) -> None:
    assert operation_title(kind, name) == title
