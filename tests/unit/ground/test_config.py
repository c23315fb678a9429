"""Settings: read from the environment once, typed, and wrong ones named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from ring_notebook import config as module
from ring_notebook.config import Config, config


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for field in fields(Config):
        monkeypatch.delenv(f"RING_{field.name.upper()}", raising=False)
    for alias in module._ALIASES.values():
        monkeypatch.delenv(alias, raising=False)
    config.cache_clear()
    yield
    config.cache_clear()


def test_defaults_without_variables() -> None:
    assert config() == Config()


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("RING_ALGORITHM", "ring", "algorithm", "ring"),
        ("RING_FUSION_THRESHOLD", "1048576", "fusion_threshold", 1048576),
        ("RING_TIMEOUT", "2.5", "timeout", 2.5),
        ("RING_RUNS_DIR", "/data/runs", "runs_dir", "/data/runs"),
        ("HOROVOD_FUSION_THRESHOLD", "4096", "fusion_threshold", 4096),
        ("HOROVOD_TIMELINE", "trace.json", "timeline", "trace.json"),
        ("RING_TIMEOUT", "", "timeout", 0.0),
        ("RING_TIMEOUT", "inf", "timeout", math.inf),
        ("RING_SPIN", "-1", "spin", -1.0),
        ("RING_ISA", "baseline", "isa", "baseline"),
    ],
)
def test_a_variable_sets_its_field(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(config(), name) == value


def test_our_own_name_wins_over_horovods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1")
    monkeypatch.setenv("RING_FUSION_THRESHOLD", "2")
    assert config().fusion_threshold == 2


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("RING_FUSION_THRESHOLD", "64MB", "RING_FUSION_THRESHOLD='64MB': expected an integer"),
        ("RING_TIMEOUT", "soon", "RING_TIMEOUT='soon': expected a number"),
        ("RING_TIMEOUT", "nan", "RING_TIMEOUT='nan': expected 0 or more"),
        ("RING_TIMEOUT", "-1", "RING_TIMEOUT='-1': expected 0 or more"),
        ("RING_INLINE", "1e3", "RING_INLINE='1e3': expected an integer"),
        ("RING_INLINE", "9" * 30, "RING_INLINE='9{30}': expected 1073741824 or less"),
        ("RING_MIN_NP", "0", "RING_MIN_NP='0': expected 1 or more"),
        ("RING_WIRE", "int8", "RING_WIRE='int8': expected one of float16, bfloat16"),
        ("RING_STAGING", "disk", "RING_STAGING='disk': expected one of auto, cache, memory"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "HOROVOD_FUSION_THRESHOLD='64MB': expected an integer"),
        ("RING_SEGMENT", "-4096", "RING_SEGMENT='-4096': expected 0 or more"),
        ("RING_SPIN", "nan", "RING_SPIN='nan': expected -1 or more"),
        ("RING_ALGORITHM", "tree", "RING_ALGORITHM='tree': expected one of auto, push, ring"),
        ("RING_ISA", "sse9", "RING_ISA='sse9': expected one of baseline, avx2, avx512"),
    ],
)
def test_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=message):
        config()


@pytest.mark.parametrize(("text", "seconds"), [("", 120.0), ("-1", 120.0), ("7.5", 7.5), ("0", 1e6), ("inf", 1e6)])
def test_how_long_a_start_may_take(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("RING_START_TIMEOUT", text)
    assert config().start_limit(120.0) == seconds


def test_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = config()
    monkeypatch.setenv("RING_TIMEOUT", "9")
    assert config() is before


def test_every_field_says_which_variable_sets_it() -> None:
    source = Path(module.__file__).read_text()
    for field in fields(Config):
        assert f'"""RING_{field.name.upper()}' in source
