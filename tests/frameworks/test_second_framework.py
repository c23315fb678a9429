"""A face for another framework needs no line in engine/ or notebook/: one for numpy, in real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.numpy_framework import numpy_framework
from ring_notebook.errors import CollectiveMismatch
from ring_notebook.notebook.cluster.cluster import Cluster
from ring_notebook.notebook.panel.hints import Lint
from ring_notebook.notebook.record.run_view import RunState

TRAINING = """
import numpy as np
weights = np.zeros(3)
for step in range(10):
    weights -= 0.5 * ring.allreduce(weights - (ring.rank() + 1))
    ring.log(error=abs(weights - 1.5).max())
face = ring.__name__
"""


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package of the face is found by the kernel here and by the engines."""
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RING_RUNS_DIR", str(site / "runs"))
        with numpy_framework(site):
            yield


@pytest.fixture(scope="module")
def cluster(_installed: None) -> Iterator[Cluster]:
    with Cluster(2) as started:
        yield started


@pytest.mark.timeout(120)
def test_engines_load_its_face_and_no_other(cluster: Cluster) -> None:
    cluster.run("import sys\nloaded = sorted({'torch', 'numpy_face'} & set(sys.modules))\nring.init()").wait()
    assert cluster.pull("loaded") == ["numpy_face"]


def test_a_cell_trains_with_it(cluster: Cluster) -> None:
    run = cluster.run(TRAINING).wait()
    assert cluster.pull("face") == "numpy_face"
    assert cluster.pull("weights").round(2).tolist() == [1.5, 1.5, 1.5]
    assert run.status == "ok"


def test_a_mismatch_is_one(cluster: Cluster) -> None:
    with pytest.raises(CollectiveMismatch, match="shape"):
        cluster.run("import numpy as np\nring.allreduce(np.ones(2 + ring.rank()))").wait()


def test_objects_with_arrays_stay_one_where_they_were_one(cluster: Cluster) -> None:
    cluster.run(
        "import numpy as np\n"
        "table = np.arange(6.0).reshape(2, 3).T\n"
        "sent = {'a': table, 'again': table, 'text': 'x'} if ring.rank() == 0 else None\n"
        "came = ring.broadcast_object(sent)\n"
        "same = came['a'] is came['again']\n"
        "sizes = [len(words) for words in ring.allgather_object(['word'] * ring.rank())]"
    ).wait()
    assert [cluster.pull(name, 1) for name in ("same", "sizes")] == [True, [0, 1]]
    assert cluster.pull("came", 1)["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_an_elastic_training_goes_back_to_its_commit(cluster: Cluster) -> None:
    cluster.run(
        "import numpy as np\n"
        "from ring_notebook.errors import HorovodInternalError\n"
        "tries = 0\n"
        "@ring.run\n"
        "def train(state):\n"
        "    global tries\n"
        "    tries += 1\n"
        "    while state.commits < 3:\n"
        "        state.weights += ring.allreduce(np.ones(2), op=ring.Sum)\n"
        "        if tries == 1 and state.commits == 1:\n"
        "            raise HorovodInternalError('a rank is gone')\n"
        "        state.commit()\n"
        "    return state.weights\n"
        "trained = train(ring.ArrayState(np.zeros(2) + ring.rank()))"
    ).wait()
    assert cluster.pull("tries") == 2
    assert cluster.pull("trained", 1).tolist() == [6.0, 6.0]


@pytest.mark.slow
def test_a_cell_of_another_framework_gets_the_face_of_that(cluster: Cluster) -> None:
    cluster.run(
        "import torch\nmean = ring.allreduce(torch.ones(2) * ring.rank()).tolist()\nface = ring.__name__"
    ).wait()
    assert [cluster.pull(name) for name in ("face", "mean")] == ["ring_notebook.torch", [0.5, 0.5]]
    cluster.run("face = ring.__name__").wait()
    assert cluster.pull("face") == "ring_notebook.torch"
    cluster.run(TRAINING).wait()
    assert cluster.pull("face") == "numpy_face"


def test_a_ring_of_the_user_s_own_is_left_alone(cluster: Cluster) -> None:
    cluster.run("ring = 'gold'").wait()
    cluster.run("import numpy\nkept = ring").wait()
    assert cluster.pull("kept") == "gold"
    cluster.run("del ring").wait()


def test_hints_use_its_words() -> None:
    cell = "import numpy\nstep = descent.Momentum()\ngradient = differentiate(loss)\n"
    [hint] = Lint(cell).hints(RunState(2, started=0.0).view(1.0))
    assert hint.line == 2
    assert hint.text.endswith("After this line add `gradient = ring.allreduce(gradient)`")


def test_an_exported_script_imports_its_face(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(TRAINING + "\n# cupy").wait().export(tmp_path / "train.py")
    text = (tmp_path / "train.py").read_text()
    assert "\nimport numpy_face as ring\n" in text
    assert "\nimport cupy\n" in text
