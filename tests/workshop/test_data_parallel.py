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


def test_02_under_the_hood(workshop: Workshop) -> None:
    measured, _ = workshop(
        "02_under_the_hood",
        [
            ("outgoing = (me - step) % n", "outgoing = me", "What did the rank before pass on"),
            ("incoming = (me - step - 1) % n", "incoming = me", "Where does what is received go"),
        ],
    )
    assert measured["sent by each of 4 ranks, in tensors"] == measured["2(N-1)/N"]
    assert measured["core is faster, times (median over sizes)"] > 1


@pytest.mark.slow
def test_03_data_parallel(workshop: Workshop) -> None:
    measured, said = workshop(
        "03_data_parallel",
        [
            ("ring.Average", "ring.Sum", "Is it a sum?"),
            ("allreduce_(", "allreduce(", "with an underscore, works in place"),
        ],
    )
    assert "the ranks may start from different weights: before this line add" in said
    began, ended = (measured[f"apart without broadcast, {when} step"] for when in ("first", "last"))
    assert began == pytest.approx(ended, rel=1e-3)
    assert began > 1
    assert measured["apart with prepare, last step"] == 0
    accuracy = {name: measured[f"accuracy, {name}"] for name in ("one process", "five changes", "prepare")}
    assert min(accuracy.values()) > max(0.93, measured["accuracy, without broadcast"])


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
        assert measured["weak, efficiency on 4"] < 0.75
        assert "they take turns on 2 cores" in said


@pytest.mark.slow
def test_05_timeline(workshop: Workshop) -> None:
    both = "handles = [begin(gradient) for gradient in gradients]\n    compute()"
    measured, said = workshop(
        "05_timeline",
        [
            (both, "\n    ".join(reversed(both.split("\n    "))), "fewer than two allreduces are under way"),
            ("for handle in handles]", "for handle in handles[:1]]", "Return the sum of each gradient"),
        ],
    )
    assert "Rank 1 is" in said
    waited = [measured[f"straggler: rank {rank} waited, % of the time"] for rank in range(2)]
    assert waited[0] > waited[1]
    assert measured["one after the other, ms a step"] > 20
    assert measured["overlapped, ms a step"] > 20
    assert measured["512 operations, ms"] > measured["one operation, ms"]


@pytest.mark.slow
def test_06_large_batches(workshop: Workshop) -> None:
    measured, _ = workshop(
        "06_large_batches",
        [
            ("1 + (scale - 1) * min(1, t / warmup)", "scale * min(1, t / warmup)", "The first step has another rate"),
            ("min(1, t / warmup)", "t / warmup", "After the warm-up"),
        ],
    )
    accuracy = {name.removeprefix("accuracy, "): value for name, value in measured.items() if "accuracy" in name}
    assert accuracy["batch 256, rate x 32"] < accuracy["batch 256, same rate"] < accuracy["batch 8"]
    for name in ("batch 256, rate x 32, warm-up", "batch 256, LARS", "batch 256, LAMB"):
        assert accuracy[name] > accuracy["batch 256, same rate"]


@pytest.mark.slow
def test_07_batch_size(workshop: Workshop) -> None:
    measured, _ = workshop(
        "07_batch_size",
        [
            ("(small - large) / (1 / b - 1 / big)", "small - large", "small - large is tr Σ times"),
            ("large - trace / big", "large", "what is left of `large` without the noise"),
        ],
    )
    assert 0.5 < measured["meter / definition (median)"] < 2
    scale = measured["definition, samples (median until the loss is 0.3)"]
    assert 0.1 < measured["bend of the steps, samples"] / scale < 10  # an order of magnitude
    assert measured["definition, second half / first half (medians)"] > 1
    assert measured["steps with batch 4 / with batch 512"] > 3


@pytest.mark.slow
def test_16_keras(workshop: Workshop) -> None:
    if find_spec("keras") is None:
        pytest.skip("needs Keras: PYTHONPATH=.tensorflow/packages, after make .tensorflow/installed")
    measured, said = workshop(
        "16_keras",
        [
            ("op=ring.Average", "op=ring.Sum", "Is it a sum?"),
            ("logs[name] = float", "float", "Is the result put back into it?"),
        ],
    )
    assert min(value for name, value in measured.items() if name.startswith("accuracy")) > 0.85
    assert measured["apart with prepare, last step"] == 0
    compared = {name: value for name, value in measured.items() if "and numpy differ" in name}
    assert len(compared) + said.count("is not installed here") == 2
    assert all(value < 1e-4 for value in compared.values())
