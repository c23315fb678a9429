"""Scripts in the form that Horovod's documentation gives them for PyTorch run with no line changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ring_notebook.torch as hvd
from ring_notebook.horovod.as_horovod import as_horovod

# They take seconds each. Two ranks can do all of it, Adasum too.
pytestmark = pytest.mark.sizes(2, slow=(3,))
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    hvd.shutdown()
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> dict[str, Any]:
    """Run a script in this rank as ``python name.py arguments`` would; returns its globals."""
    source = (SCRIPTS / name).read_text()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with as_horovod():
        exec(compile(source, name, "exec"), namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [(), ("--fp16-allreduce",), ("--gradient-predivide-factor", "2.0"), ("--use-adasum", "--lr", "0.05")],
    ids=" ".join,
)
def test_mnist(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], size: int) -> None:
    if "--use-adasum" in arguments and size == 3:
        pytest.skip("Adasum is defined for powers of two")
    ended = run(monkeypatch, "mnist.py", *arguments)
    assert ended["accuracy"] > 0.85
    assert hvd.allgather_object(ended["accuracy"]) == [ended["accuracy"]] * size
    hvd.check(ended["model"])


@pytest.mark.slow
def test_synthetic_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: int) -> None:
    run(monkeypatch, "synthetic_benchmark.py", "--fp16-allreduce")
    shown = capsys.readouterr().out
    assert (f"Total img/sec on {size} CPU(s)" in shown) is (hvd.rank() == 0)


@pytest.mark.slow
def test_elastic_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = run(monkeypatch, "elastic_mnist.py")
    assert ended["starts"] == 2, "it failed once and went on"
    assert ended["state"].epoch == 4
    assert ended["accuracy"] > 0.85
    hvd.check(ended["model"])
