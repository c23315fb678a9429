"""Keras and TensorFlow in cells of real engines: rows of `fit`, mismatches, interrupts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from harness.waiting import until
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster

if find_spec("keras") is None:
    pytest.skip("lives in an environment of its own: make test-tensorflow", allow_module_level=True)
TRAINING = """
import keras
import numpy as np
x = np.random.default_rng(ring.rank()).normal(size=(EXAMPLES, 8)).astype("float32")
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile(optimizer=ring.DistributedOptimizer(keras.optimizers.SGD(0.001)), loss="mse")
start = ring.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(x, x.sum(axis=1), batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[start])
"""
EQUAL = """
weights = ring.allgather_object([np.asarray(weight) for weight in model.get_weights()])
equal = all((a == b).all() for a, b in zip(*weights))
"""


def training(examples: int, epochs: int) -> str:
    return TRAINING.replace("EXAMPLES", str(examples)).replace("EPOCHS", str(epochs))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RING_RUNS_DIR", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("KERAS_BACKEND", "tensorflow")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        with Cluster(2) as started:
            yield started


@pytest.mark.timeout(300)
def test_fit_logs_by_itself(cluster: Cluster) -> None:
    run = cluster.run(training(64, 2) + EQUAL).wait()
    assert run.status == "ok"
    assert cluster.pull("equal") is True
    names = set(run.metrics.to_pandas().columns)
    assert {"loss", "samples", "epoch"} <= names


@pytest.mark.timeout(300)
def test_a_mismatch_in_a_function_is_one(cluster: Cluster) -> None:
    cell = (
        "import tensorflow as tf\ntf.function(lambda x: ring.allreduce(x), autograph=False)(tf.ones(2 + ring.rank()))"
    )
    with pytest.raises(CollectiveMismatch, match="shape"):
        cluster.run(cell).wait()


@pytest.mark.timeout(300)
def test_an_interrupt_ends_fit_and_leaves_equal_weights(cluster: Cluster) -> None:
    run = cluster.run(training(8000, 1000))
    until(lambda: len(run.metrics) > 20, 120)
    assert run.stop() is True
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    cluster.run("import keras\n" + EQUAL).wait()
    assert cluster.pull("equal") is True


@pytest.mark.timeout(300)
def test_an_interrupt_ends_an_operation_of_a_function_that_waits(cluster: Cluster) -> None:
    run = cluster.run(
        "import tensorflow as tf, time\n"
        "call = tf.function(lambda x: ring.allreduce(x), autograph=False)\n"
        "if ring.rank() == 0: call(tf.ones(2))\n"
        "else: time.sleep(100)\n"
    )
    until(lambda: [status.line for _, status in sorted(run.log.statuses().items())] == [3, 4], 60)
    time.sleep(1)
    assert run.stop(10) is True
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert cluster.run("import tensorflow as tf\nx = float(ring.allreduce(tf.constant(ring.rank() * 1.0)))").wait()
    assert cluster.pull("x") == 0.5
