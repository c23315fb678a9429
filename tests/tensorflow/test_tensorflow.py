"""TensorFlow and Keras on ranks: `make test-tensorflow`."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.case_jobs import cases, check, of_a_job
from harness.programs import RINGRUN, ran
from unit.horovod.horovod_names import WITH_TENSORFLOW

if find_spec("keras") is None:
    pytest.skip("lives in an environment of its own: make test-tensorflow", allow_module_level=True)
TENSORFLOW, KERAS, SHARED = (
    Path(__file__).with_name(f"{name}_cases.py") for name in ("tensorflow", "keras", "shared_names")
)


@of_a_job
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", cases(TENSORFLOW))
def test_tensorflow(case: str, size: int) -> None:
    check(TENSORFLOW, case, size)


@of_a_job
@pytest.mark.parametrize(("face", "size"), [("tensorflow", 2), ("keras", 3)])
@pytest.mark.parametrize("case", cases(SHARED))
def test_names_of_both(case: str, face: str, size: int) -> None:
    check(SHARED, case, size, FACE=face)


@pytest.mark.parametrize("module", WITH_TENSORFLOW)
def test_every_name_of_horovod_is_used_by_a_case(module: str) -> None:
    cases = [KERAS if "keras" in module else TENSORFLOW, SHARED]
    used = {
        ast.unparse(node).removeprefix("hvd.").removeprefix("module.")
        for path in cases
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    last = module.rpartition(".")[2]
    prefix = f"{last}." if last in ("callbacks", "elastic", "util") else ""
    assert [name for name in WITH_TENSORFLOW[module].split() if prefix + name not in used] == []


@of_a_job
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch", "tf_keras"])
@pytest.mark.parametrize("case", cases(KERAS))
@pytest.mark.parametrize("size", [2, 3])
def test_keras(case: str, size: int, backend: str) -> None:
    if backend == "tf_keras":
        check(KERAS, case, size, TF_USE_LEGACY_KERAS="1")
    else:
        check(KERAS, case, size, KERAS_BACKEND=backend)


SCRIPT = """
import importlib
import horovod.tensorflow.keras as hvd
import keras
import numpy as np

missing = {module: [name for name in names.split() if not hasattr(importlib.import_module(module), name)]
           for module, names in NAMES.items()}
hvd.init()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
model.fit(x, x.sum(axis=1), epochs=1, callbacks=callbacks, verbose=0)
total = float(hvd.allreduce(model.get_weights()[0], op=hvd.Sum).sum())
print(sum(missing.values(), []), round(total - hvd.size() * float(model.get_weights()[0].sum()), 5))
"""


@pytest.mark.timeout(300)
def test_horovods_names_and_a_script_with_them() -> None:
    command = [*RINGRUN, "--horovod", "--no-prefix", "-np", "2"]
    script = SCRIPT.replace("NAMES.items", f"{WITH_TENSORFLOW!r}.items")
    done = ran([*command, sys.executable, "-c", script], timeout=280)
    assert done.stdout == "[] 0.0\n" * 2, done.stderr


INTERRUPTED = """
import os, signal, threading
import tensorflow as tf
import ring_notebook.tensorflow as hvd
hvd.init()
hvd.allreduce(tf.ones(3))
if hvd.rank() == 1:
    threading.Event().wait()  # until rank 0 has ended
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    WAIT
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(3)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "wait", ["hvd.allreduce(tf.ones(3))", "tf.function(lambda: hvd.allreduce(tf.ones(3)), autograph=False)()"]
)
def test_ctrl_c_in_an_operation_that_waits_is_an_interrupt(wait: str) -> None:
    script = INTERRUPTED.replace("WAIT", wait)
    command = [*RINGRUN, "--no-prefix", "-np", "2"]
    done = ran([*command, sys.executable, "-c", script], timeout=280)
    assert "interrupted\n" in done.stdout, done.stderr
