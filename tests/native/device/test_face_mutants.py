"""Leaving out what keeps torch's tensors in order with their streams makes tests fail.

A mutant is one module of the package in which one passage is replaced as it is imported; the tests run with it in
processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs import ran

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "ranks" / "devices"
# Every process that finds it imports it first.
IMPORTED_FIRST = """
import importlib.machinery, importlib.util, json, os, sys

mutations = json.loads(os.environ["MUTATIONS"])


class Changed(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        return compile(self.get_source(fullname).replace(*self.mutation), self.path, "exec")


class Finder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in mutations:
            return None
        mutation = mutations.pop(fullname)
        found = importlib.util.find_spec(fullname)
        loader = Changed(fullname, found.origin)
        loader.mutation = mutation
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


sys.meta_path.insert(0, Finder())
"""

# what is left out, in which module, the passage, what takes its place, which test sees it
MUTANTS = {
    "the wait for the stream of the tensors": (
        "torch.devices",
        "kind.stream_of(tensor),",
        "0,",
        "test_device_collectives.py::test_a_result_waits_for_what_was_queued_before_it",
    ),
    "the wait of the stream that asks": (
        "torch.devices",
        "self._work.wait(stream=self._kind.stream_of(self._like))",
        "self._work.wait()",
        "test_device_collectives.py::test_synchronize_orders_the_stream_that_asks",
    ),
    "the wait for a number that is logged": (
        "torch.devices",
        "done: bool = self._event.query()",
        "done = True",
        "test_logging.py::test_a_logged_loss_does_not_wait_for_its_device",
    ),
    "the copy of what is logged": (
        "torch.devices",
        'tensor.detach().to("cpu", non_blocking=True)',
        'tensor.detach().to("cpu")',
        "test_logging.py::test_a_logged_loss_does_not_wait_for_its_device",
    ),
    "flags of a bucket in CPU memory": (
        "torch.optimizer.bucket",
        'dtype=kind, device="cpu")',
        "dtype=kind, device=self.parameters[0].device)",
        "test_device_training.py::test_the_host_waits_for_nothing_within_a_step",
    ),
    "small gradients brought back": (
        "torch.optimizer.bucket",
        "self._packer.unpack()",
        "pass",
        "test_device_training.py::test_ranks_train_as_one_process",
    ),
}


def run(folder: Path, mutations: dict[str, tuple[str, str]], *tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(IMPORTED_FIRST)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
        "MUTATIONS": json.dumps({f"ring_notebook.{module}": one for module, one in mutations.items()}),
    }
    choice = ["-m", "slow or not slow", *(f"{TESTS}/{test}" for test in tests)]
    return ran(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *choice],
        cwd=ROOT,
        env=environment,
        timeout=300,
    )


@pytest.fixture(scope="module")
def _pass_unchanged(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests pass where modules are replaced and nothing is left out."""
    same = {module: (passage, passage) for module, passage, _, _ in MUTANTS.values()}
    done = run(tmp_path_factory.mktemp("unchanged"), same, *{test: None for *_, test in MUTANTS.values()})
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_pass_unchanged")
@pytest.mark.parametrize("name", MUTANTS)
def test_tests_of_the_face_notice_when_it_is_left_out(name: str, tmp_path: Path) -> None:
    module, passage, replacement, test = MUTANTS[name]
    file = ROOT / "ring_notebook" / f"{module.replace('.', '/')}.py"
    assert file.read_text().count(passage) == 1, f"{module} has changed: the mutation must name one passage of it"
    changed = run(tmp_path, {module: (passage, replacement)}, test)
    assert changed.returncode == 1, f"no test notices that {name} is missing: {changed.stdout}"
