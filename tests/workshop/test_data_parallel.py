"""The notebooks of the workshop about data parallel training show what they say, and their checks help."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from workshop.conftest import Workshop


@pytest.mark.slow
def test_01_quickstart(workshop: Workshop) -> None:
    right = "linear, optimizer, loader = ring.prepare(linear, optimizer, loader)"
    measured, said = workshop(
        "01_quickstart",
        [
            (right, "linear, optimizer = ring.prepare(linear, optimizer)", "each rank has all 90 batches"),
            (right, "linear, loader = ring.prepare(linear, loader)", "this optimizer averages no gradients"),
        ],
    )
    assert measured["test accuracy here"] > 0.96
    assert "the gradients of the ranks are never averaged" in said


@pytest.mark.slow
def test_02_under_the_hood(workshop: Workshop) -> None:
    workshop(
        "02_under_the_hood",
        [
            ("outgoing = (me - step) % n", "outgoing = me", "What did the rank before pass on"),
            ("incoming = (me - step - 1) % n", "incoming = me", "Where does what is received go"),
        ],
    )


@pytest.mark.slow
def test_03_data_parallel(workshop: Workshop) -> None:
    _, said = workshop(
        "03_data_parallel",
        [
            ("ring.Average", "ring.Sum", "Is it a sum?"),
            ("allreduce_(", "allreduce(", "with an underscore, works in place"),
        ],
    )
    assert "the ranks may start from different weights: before this line add" in said


@pytest.mark.slow
def test_04_scaling(workshop: Workshop) -> None:
    measured, said = workshop(
        "04_scaling",
        [
            ("compute / n", "compute", "4 hosts need 0.25 s"),
            ("2 * (n - 1) / n * nbytes", "(n - 1) / n * nbytes", "100 bytes at 100 bytes/s take 2"),
            ("2 * (n - 1) * latency", "latency", "4 hosts send 6 messages"),
        ],
    )
    assert "4 ranks: predicted" in said
    for kind in ("weak", "strong"):
        assert measured[f"{kind}, efficiency on 1"] == 1
        assert 0 < measured[f"{kind}, efficiency on 4"] < 1
    if measured["cores or GPUs"] <= 2:  # with room for what other processes take from the run on one rank
        assert "they take turns on 2 cores" in said


@pytest.mark.slow
def test_05_timeline(workshop: Workshop) -> None:
    both = "handles = [begin(gradient) for gradient in gradients]\n    compute()"
    workshop(
        "05_timeline",
        [
            (both, "\n    ".join(reversed(both.split("\n    "))), "fewer than two allreduces are under way"),
            ("for handle in handles]", "for handle in handles[:1]]", "Return the sum of each gradient"),
        ],
    )


@pytest.mark.slow
def test_06_large_batches(workshop: Workshop) -> None:
    workshop(
        "06_large_batches",
        [
            ("1 + (scale - 1) * min(1, t / warmup)", "scale * min(1, t / warmup)", "The first step has another rate"),
            ("min(1, t / warmup)", "t / warmup", "After the warm-up"),
        ],
    )


@pytest.mark.slow
def test_07_batch_size(workshop: Workshop) -> None:
    measured, _ = workshop(
        "07_batch_size",
        [
            ("(small - large) / (1 / b - 1 / big)", "small - large", "small - large is tr Σ times"),
            ("large - trace / big", "large", "what is left of `large` without the noise"),
        ],
    )
    assert measured["steps with batch 4 / with batch 512"] > 3


@pytest.mark.slow
def test_16_keras(workshop: Workshop) -> None:
    if find_spec("keras") is None:
        pytest.skip(
            "needs Keras: make .tensorflow/installed, PYTHONPATH=$(echo $PWD/.tensorflow/venv/lib/*/site-packages)"
        )
    measured, said = workshop(
        "16_keras",
        [
            ("op=ring.Average", "op=ring.Sum", "Is it a sum?"),
            ("logs[name] = float", "float", "Is the result put back into it?"),
        ],
    )
    compared = {name: value for name, value in measured.items() if "and numpy differ" in name}
    assert len(compared) + said.count("is not installed here") == 2
