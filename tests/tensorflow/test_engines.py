"""Keras and TensorFlow in cells of real engines: rows of `fit`, mismatches, interrupts."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from harness.waiting import until
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel.charts.chart import over
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import listing

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
    rows = run.metrics.to_pandas()
    assert {"loss", "samples", "epoch"} <= set(rows.columns)
    several = cluster.run(training(60, 2).replace("compile(", "compile(steps_per_execution=3, ")).wait()
    assert several.status == "ok"
    assert several.metrics.to_pandas().groupby("rank")["samples"].sum().tolist() == [128, 128]  # 8 batches of 8, twice


@pytest.mark.timeout(300)
def test_a_snapshot_brings_back_a_model_and_its_optimizer(cluster: Cluster) -> None:
    import_keras = "import keras, numpy as np, tensorflow as tf\n"
    cluster.run(training(64, 1) + "import tensorflow as tf\nrow = tf.constant([1.0, ring.rank()])\n").wait()
    cluster.snapshot("trained")
    again = "model.fit(x, x.sum(axis=1), batch_size=8, epochs=1, verbose=0, shuffle=False)\n"
    result = "total = float(sum(abs(one).sum() for one in model.get_weights()))\n"
    cluster.run(import_keras + again + result + "row = None").wait()
    totals = [cluster.pull("total", rank) for rank in range(2)]
    assert "variables of trained" in cluster.restore("trained")
    cluster.run(import_keras + again + result + EQUAL + "value = row.numpy().tolist()").wait()
    assert [cluster.pull("total", rank) for rank in range(2)] == totals
    assert cluster.pull("equal") is True
    assert [cluster.pull("value", rank) for rank in range(2)] == [[1.0, 0.0], [1.0, 1.0]]


CHECKPOINTS = """
import keras
import numpy as np
class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        epochs.append(epoch)
        if epoch == LAST: raise SystemExit
epochs = []
keras.utils.set_random_seed(ring.size())
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
data = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
model, (x, y) = ring.prepare(model, (data, data[:, :1]))
saved = ring.checkpoint(model, best="loss")
model.fit(x, y, batch_size=32 // ring.size(), epochs=4, shuffle=False, verbose=0, callbacks=[Watch(), saved])
weights = [np.asarray(weight) for weight in model.get_weights()]
"""


@pytest.mark.timeout(300)
def test_fit_resumes_from_a_checkpoint_on_one_rank(cluster: Cluster) -> None:
    first = cluster.run(CHECKPOINTS.replace("LAST", "-1")).wait()
    whole = cluster.pull("weights")
    cluster.run(CHECKPOINTS.replace("LAST", "2"), name="stops", options={"name": "stops"}).wait()
    assert re.search("^stops .* step 2, best 2 ", str(listing(every=True)), re.MULTILINE), listing(every=True)
    resumed = {"resume": True, "name": "stops"}
    run = cluster.run(CHECKPOINTS.replace("LAST", "-1"), n=1, options=resumed).wait()
    assert any(
        "Resumed after step 2, in epoch 2, from " in one.text for one in RunRecord.load(run.log.directory).output()
    )
    assert cluster.pull("epochs", 0) == [2, 3]
    for ours, theirs in zip(cluster.pull("weights", 0), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for axis in ("step", "samples", "epoch"):
        curves = [over(view, axis, "loss")[0].x.tolist() for view in (first.log.view(), run.log.view())]
        assert curves[0][2:] == curves[1], axis


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


@pytest.mark.timeout(300)
def test_the_learning_rate_is_a_knob_and_fit_pauses(cluster: Cluster) -> None:
    run = cluster.run(training(8000, 1000))
    until(lambda: len(run.metrics) > 20, 120)
    run.set(lr=0.5e-3)
    until(lambda: any(change.values == {"lr": 0.5e-3} for change in run.changes), 60)
    run.pause()
    until(lambda: run.view.paused, 60)
    run.resume()
    rows = len(run.metrics)
    until(lambda: len(run.metrics) > rows + 20, 60)
    run.stop()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    cluster.run(
        "import keras\nrate = round(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)), 7)"
    ).wait()
    assert [cluster.pull("rate", rank) for rank in range(2)] == [0.5e-3] * 2


@pytest.mark.timeout(300)
def test_an_exception_in_fit_is_the_one_of_its_rank(cluster: Cluster) -> None:
    failing = (
        "class Break(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        "        if ring.rank() == 1 and batch == 3: raise OSError('no more data')\n"
    )
    cell = training(64, 2).replace("model.fit", f"{failing}model.fit").replace("[start]", "[start, Break()]")
    with pytest.raises(OSError, match="no more data"):
        cluster.run(cell).wait()
    cluster.run("import keras\n" + EQUAL).wait()
    assert cluster.pull("equal") is True


@pytest.mark.timeout(300)
def test_a_rank_with_more_batches_is_seen_to_wait(cluster: Cluster) -> None:
    cell = training(64, 1).replace("size=(64, 8)", "size=(64 + 8 * ring.rank(), 8)")
    with pytest.raises(CollectiveAborted, match="has left"):
        cluster.run(cell).wait()


@pytest.mark.timeout(300)
def test_an_interrupt_ends_a_session_that_waits(cluster: Cluster) -> None:
    run = cluster.run(
        "import tensorflow as tf, time\n"
        "with tf.Graph().as_default(), tf.compat.v1.Session() as session:\n"
        "    op = ring.allreduce(tf.ones(2))\n"
        "    if ring.rank() == 0: session.run(op)\n"
        "    else: time.sleep(100)\n"
    )
    until(lambda: [status.line for _, status in sorted(run.log.statuses().items())] == [4, 5], 60)
    assert run.stop(10) is True
    with pytest.raises(KeyboardInterrupt):
        run.wait()


@pytest.mark.timeout(300)
def test_programs_of_jax_end_with_interrupts_mismatches_and_exceptions(cluster: Cluster) -> None:
    """Also those that JAX has called before, whose allreduce needs no Python."""
    begin = "import jax, jax.numpy as jnp, time\n"
    run = cluster.run(
        f"{begin}step = jax.jit(lambda x: ring.allreduce(x, op=ring.Sum))\n"
        "for _ in range(3): step(jnp.ones(3)).block_until_ready()\n"
        "if ring.rank() == 0: step(jnp.ones(3)).block_until_ready()\n"
        "else: time.sleep(100)\n"
    )
    until(lambda: [status.line for _, status in sorted(run.log.statuses().items())] == [4, 5], 60)
    time.sleep(1)
    assert run.stop(10) is True
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    with pytest.raises(CollectiveMismatch, match=r"expected float32 \[\d\], rank \d sent"):
        cluster.run(f"{begin}step(jnp.ones(3 + ring.rank())).block_until_ready()").wait()
    with pytest.raises(OSError, match="no more data"):
        cluster.run(f"{begin}if ring.rank() == 1: raise OSError('no more data')\nstep(jnp.ones(3))").wait()
    cluster.run(f"{begin}total = float(step(jnp.ones(3))[0])").wait()
    assert cluster.pull("total") == 2.0


@pytest.mark.timeout(300)
def test_a_program_of_jax_that_a_cell_has_begun_ends_in_its_run(cluster: Cluster) -> None:
    cell = (
        "import jax, jax.numpy as jnp, time\n"
        "def slow(x):\n"
        "    for _ in range(20): x = jnp.tanh(x @ x)\n"
        "    return ring.allreduce(x.sum())\n"
        "if 'begun' not in globals(): begun, square = jax.jit(slow), jnp.full((300, 300), 0.001)\n"
        "y = begun(square)\n"
        "if ring.rank() == 0: time.sleep(1)\n"
    )
    for _ in range(3):
        cluster.run(cell).wait()
        cluster.run("import jax\nvalue = float(y)").wait()
        assert cluster.pull("value") == cluster.pull("value", 1)


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_in_fit_is_healed_and_takes_the_weights_of_the_other(cluster: Cluster) -> None:
    prepared = (
        "import keras, numpy as np\n"
        "if 'kept' not in globals():\n"
        "    kept = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])\n"
        "    kept.compile(optimizer=keras.optimizers.SGD(0.001), loss='mse')\n"
        "model = ring.prepare(kept)\n"
    )
    fitting = "x = np.ones((8000, 8), 'float32')\nmodel.fit(x, x[:, 0], batch_size=8, epochs=1000, verbose=0)\n"
    run = cluster.run(prepared + fitting)
    until(lambda: len(run.metrics) > 20, 120)
    os.kill(next(engine.pid for engine in cluster.status() if engine.rank == 0), signal.SIGKILL)
    with pytest.raises(Exception, match="rank 0"):
        run.wait()
    cluster.run("import keras\nbefore = int(model.optimizer.iterations)", ranks=[1]).wait()
    before = cluster.pull("before", 1)
    cluster.heal()
    cluster.run(prepared + EQUAL + "steps = int(model.optimizer.iterations)").wait()
    assert cluster.pull("equal") is True
    assert [cluster.pull("steps", rank) for rank in range(2)] == [before] * 2


@pytest.mark.timeout(300)
def test_a_mesh_of_jax_over_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stays between cells; a rank that dies is named."""
    monkeypatch.setenv("RING_RUNS_DIR", str(tmp_path))
    total = (
        "import jax, numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec\n"
        "import ring_notebook.jax as hvd\n"
        "hvd.start_distributed()\n"
        "mesh = Mesh(np.array(jax.devices()), ('ranks',))\n"
        "own = np.full((1, 2), 1.0 + hvd.rank(), np.float32)\n"
        "whole = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec('ranks')), own)\n"
        "sums = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(whole)\n"
        "total = float(np.asarray(sums.addressable_data(0)))\n"
        "beside = float(hvd.allreduce(own, op=hvd.Sum).sum())\n"
    )
    with Cluster(2) as cluster:
        for _ in range(2):
            cluster.run(total).wait()
            assert (cluster.pull("total"), cluster.pull("beside")) == (6.0, 6.0)
        with pytest.raises(Exception, match="rank 1"):
            cluster.run("import os, time\nif hvd.rank() == 1: os._exit(3)\nhvd.barrier()").wait()
