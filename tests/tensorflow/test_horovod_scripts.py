"""Scripts in the form that Horovod's documentation gives them for TensorFlow 1 and 2 and Keras, with no line changed.

``scripts/sitecustomize.py`` gives their ``mnist.load_data`` digits that need no download.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.programs import ran
from ring_notebook.horovod.as_horovod import variables

if find_spec("keras") is None:
    pytest.skip("lives in an environment of its own: make test-tensorflow", allow_module_level=True)
SCRIPTS = Path(__file__).parent / "scripts"
RINGRUN = (sys.executable, "-m", "ring_notebook.launch.cli", "--horovod", "--no-prefix")


def run(folder: Path, *command: str | Path, legacy: bool = True, **more: str) -> list[dict[str, float]]:
    """Run ``command`` in ``folder``; returns the names and numbers of the last line that each rank has printed."""
    env = {**os.environ, **more, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": str(int(legacy))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPTS), env.get("PYTHONPATH", "")]))
    done = ran(command, cwd=folder, env=env, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AutoGraph" not in done.stderr, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.search(r" weights [\d.]+$", line)]
    return [dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in map(str.split, lines)]


def check(ends: list[dict[str, float]], size: int, accuracy: float = 0.85) -> None:
    """All ranks have ended with equal weights, and know the digits."""
    assert len(ends) == size
    assert len({end["weights"] for end in ends}) == 1
    assert all(end.get("accuracy", 1) > accuracy for end in ends)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [("--gradient-predivide-factor", "2.0"), ("--use-adasum",)], ids=" ".join)
def test_a_monitored_session_of_tensorflow_1(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    check(run(tmp_path, *RINGRUN, "-np", "2", SCRIPTS / "tensorflow1_mnist.py", *arguments), 2)
    assert list((tmp_path / "checkpoints").glob("model.ckpt-80.*")), "rank 0 has written a checkpoint"


@pytest.mark.timeout(300)
def test_a_tape_of_tensorflow_2(tmp_path: Path) -> None:
    ends = run(tmp_path, *RINGRUN, "-np", "2", SCRIPTS / "tensorflow2_mnist.py")
    check(ends, 2)
    assert max(end["loss"] for end in ends) < 0.6
    assert list((tmp_path / "checkpoints").glob("digits-1.*"))


@pytest.mark.timeout(300)
def test_a_script_that_starts_its_ranks_by_horovod_run(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS / "tensorflow2_mnist.py", "2", "localhost:2", "gloo"]
    check(run(tmp_path, *command, **variables()), 2)


@pytest.mark.timeout(300)
def test_callbacks_of_tf_keras(tmp_path: Path) -> None:
    check(run(tmp_path, *RINGRUN, "-np", "2", SCRIPTS / "tensorflow2_keras_mnist.py"), 2)
    assert (tmp_path / "checkpoint-5.h5").exists()


@pytest.mark.timeout(300)
def test_elastic_training_of_tf_keras(tmp_path: Path) -> None:
    ends = run(tmp_path, *RINGRUN, "-np", "2", SCRIPTS / "tensorflow2_keras_mnist_elastic.py")
    check(ends, 2)
    assert {(end["starts"], end["epochs"]) for end in ends} == {(2, 5)}


@pytest.mark.timeout(300)
def test_schedules_of_keras_3_and_a_start_from_a_checkpoint(tmp_path: Path) -> None:
    command = [*RINGRUN, "-np", "2", SCRIPTS / "keras_mnist.py", "--fp16-allreduce"]
    check(run(tmp_path, *command, "--epochs", "2", legacy=False), 2, 0.5)
    ends = run(tmp_path, *command, legacy=False)
    check(ends, 2, 0.75)  # the script begins with other weights each time: 0.84 to 0.91
    assert {end["from"] for end in ends} == {2}
