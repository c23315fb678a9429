"""A cell whose last operation fails on its device after the last line of the cell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from native.fakes.device import environment
from notebook.kernel import Notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel whose engines use the fake driver and the fake NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        started = Notebook(tmp_path_factory.mktemp("notebook"))
    yield started
    started.close()


CELL = """%%ringtrain -n 2 --name late
import ctypes, time
from ring_notebook.config import config
from ring_notebook.core import world
from ring_notebook.core.buffers import DType
from ring_notebook.core.gpu_check_rank import GpuMemory
ring, memory = world.current().communicator, GpuMemory(config().cuda_library, 0)
tensor = memory.buffer(bytes(4), DType.FLOAT32, (1,))
ring.allreduce([tensor], [tensor]).wait_done()
ring.barrier()
nccl = ctypes.CDLL(config().nccl_library)
nccl.fake_nccl_set(b"error_at", ctypes.c_long(fails))
memory.call(lambda: time.sleep(0.5))
ring.allreduce([tensor], [tensor])
"""


@pytest.mark.slow
def test_the_cell_fails_and_the_next_one_works(notebook: Notebook) -> None:
    notebook.run("%load_ext ring_notebook")
    notebook.run("%ring start -n 2")
    name, shown = notebook.error(CELL.replace("fails", "1"))
    assert name == "CollectiveAborted"
    assert "remote process exited or there was a network error" in shown
    shown = notebook.run(CELL.replace("fails", "0").replace("--name late", "--name well --timeline --out run"))
    assert "GPU tensors by NCCL" in str(shown)
    assert "GPU tensors by NCCL; the whole trace" in notebook.text("print(run.timeline())")
