"""What the name of a metric says, and which charts a page has."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ring_notebook.notebook.panel.charts.metric_names import (
    expanded,
    group,
    missing,
    parts,
    sections,
    titles,
    unit,
)

MANY = ("loss", "grad/a", "grad/b", "val_loss", "grad/c", "lr")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", ""),
        ("train/loss", ""),
        ("val/loss", ""),
        ("grad/norm", "grad"),
        ("grad/layer/0", "grad"),
        ("samples/s", ""),
        ("perf/samples/s", "perf"),
        ("/odd", ""),
        ("odd/", ""),
    ],
)
def test_the_group_is_the_prefix(name: str, expected: str) -> None:
    assert group(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("samples/s", "samples/s"),
        ("perf/tokens/sec", "tokens/sec"),
        ("tokens_per_s", "tokens/s"),
        ("step_ms", "ms"),
        ("wait_seconds", "s"),
        ("memory.gib", "GiB"),
        ("memory_GiB", "GiB"),
        ("cpu_percent", "%"),
        ("ms", ""),
        ("loss", ""),
        ("loss_min", ""),
        ("given", "tokens"),
        ("given_ms", ""),
    ],
)
def test_the_unit_is_the_one_given_or_that_of_the_name(name: str, expected: str) -> None:
    assert unit(name, {"given": "tokens", "given_ms": ""}) == expected


@pytest.mark.parametrize(
    ("wanted", "found", "lacking"),
    [
        ("loss", ("loss",), []),
        ("loss+val_loss", ("loss", "val_loss"), []),
        ("loss+los", ("loss",), ["los"]),
        ("a+b", ("a+b",), []),
        ("x", (), ["x"]),
    ],
)
def test_a_plus_sign_joins_metrics(wanted: str, found: tuple[str, ...], lacking: list[str]) -> None:
    known = ("loss", "val_loss", "a+b")
    assert parts(wanted, known) == found
    assert missing([wanted], known) == lacking


def test_a_pattern_is_all_that_match() -> None:
    assert expanded(["grad/*", "loss", "grad/a"], MANY) == ("grad/a", "grad/b", "grad/c", "loss")
    assert expanded(["what/*"], MANY) == ("what/*",)
    assert missing(["grad/*", "what/*"], MANY) == ["what/*"]


def test_a_validation_has_no_chart_of_its_own() -> None:
    assert titles(MANY) == ("loss", "grad/a", "grad/b", "grad/c", "lr")
    assert titles(("train/loss", "val/loss", "test/loss", "val/acc")) == ("train/loss", "val/acc")


@pytest.mark.parametrize(
    ("search", "opened", "most", "expected"),
    [
        ("", (), 9, [("", ("loss", "lr"), 0), ("grad", ("grad/a", "grad/b", "grad/c"), 0)]),
        ("", (), 3, [("", ("loss", "lr"), 0), ("grad", ("grad/a",), 2)]),
        ("", (), 1, [("", ("loss",), 1), ("grad", (), 3)]),
        ("", ("grad",), 1, [("", ("loss",), 1), ("grad", ("grad/a", "grad/b", "grad/c"), 0)]),
        ("GRAD b", (), 1, [("grad", ("grad/b",), 0)]),
        ("*s", (), 1, [("", ("loss",), 0)]),
        ("l", (), 1, [("", ("loss", "lr"), 0)]),
        ("nothing", (), 9, []),
    ],
)
def test_charts_of_a_page(
    search: str, opened: Collection[str], most: int, expected: list[tuple[str, tuple[str, ...], int]]
) -> None:
    found = [(one.group, one.shown, one.more) for one in sections(MANY, search, opened, most)]
    assert found == expected
