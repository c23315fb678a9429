"""What the GPUs of the ranks do, read by nvidia-ml-py itself from a library without GPUs that this test compiles."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

import pytest

from native.fakes.device import NVML
from notebook.kernel import Notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel on a machine that says it has two GPUs, with a cluster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", f"{NVML()}:{os.environ.get('LD_LIBRARY_PATH', '')}")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        started = Notebook(tmp_path_factory.mktemp("notebook"))
    yield started
    started.close()


STARVED = """%%ringtrain --name starved --background --out run
import pathlib, time
def batches():
    while not pathlib.Path("seen").exists():
        time.sleep(0.04)  # slow data
        yield 0
for batch in ring.track(batches()):
    time.sleep(0.01)
    ring.log(loss=1.0, samples=1)
"""
UNTIL_TOLD = """
import pathlib, time
from ring_notebook.notebook.panel.headline import headline
deadline = time.monotonic() + 90
while not (told := [one for one in headline(run.log, run.view).warnings if "the GPUs of ranks 0-1 idle" in one]):
    assert time.monotonic() < deadline, headline(run.log, run.view)
    time.sleep(0.1)
pathlib.Path("seen").touch()
run.wait()
print(told)
"""


@pytest.mark.slow
def test_each_rank_shows_its_own_gpu_and_one_that_idles_for_data_is_told(notebook: Notebook) -> None:
    notebook.run("%load_ext ring_notebook")
    said = notebook.text("%ring start")
    assert "2 engines (one per GPU" in said
    notebook.run(STARVED)
    assert "of the time goes to waiting for data" in notebook.text(UNTIL_TOLD)
    names = "('gpu', 'gpu_memory', 'gpu_memory_left')"
    loads = f"{{(row.rank, *(row.values[name] for name in {names})) for row in run.loads}}"
    gib = 2.0**30
    found = ast.literal_eval(notebook.text(f"print(sorted({loads}))"))
    assert found == [(0, 30.0, gib, 79 * gib), (1, 20.0, 2 * gib, 78 * gib)]
    (report,) = [one for one in notebook.run("run.show()") if "text/html" in one.get("data", {})]
    assert "alt='GPU over seconds" in report["data"]["text/html"]
    assert "alt='GPU memory over seconds" in report["data"]["text/html"]
    lines = report["data"]["text/plain"].splitlines()
    head = next(line for line in lines if line.split()[:1] == ["rank"])
    assert "GPU mem" in head
    said = {line.split()[0]: line for line in lines if line.split()[:2] in (["0", "ok"], ["1", "ok"])}
    assert "30%" in said["0"]
    assert "1 GiB" in said["0"]
    assert "20%" in said["1"]
    assert "2 GiB" in said["1"]
