"""Threads of Gloo's: seen to be in an operation as long as one of them is, and ended in it by their connections."""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

import ring_notebook.torch as hvd
from harness.absent_ranks import AbsentRanks
from harness.waiting import until
from ring_notebook.torch.process_group.run_groups.foreign_waits import end_foreign_waits, foreign_threads_rest

pytestmark = [pytest.mark.sizes(3), pytest.mark.filterwarnings("ignore:`?torch.distributed:FutureWarning")]


def test_a_sum_that_one_rank_has_begun(rank: int) -> None:
    hvd.init()
    hvd.process_group("gloo")
    dist.barrier()
    until(foreign_threads_rest)
    if rank:
        hvd.barrier()
    pending = dist.all_reduce(torch.ones(1), async_op=True)
    assert pending is not None
    if rank == 0:
        until(lambda: not foreign_threads_rest())
        assert foreign_threads_rest()  # that one is given up
        hvd.barrier()
    pending.wait()
    until(foreign_threads_rest)
    dist.destroy_process_group()
    hvd.shutdown()


def test_a_wait_ends_whatever_store_the_ranks_have_met_in(rank: int, size: int, tmp_path: Path) -> None:
    """A library may start the group by itself. Connections that are not Gloo's stay."""
    hvd.init()
    store = dist.FileStore(hvd.broadcast_object(str(tmp_path / "store")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as own:
        peer, _ = server.accept()
        if rank == 0:
            pending = dist.all_reduce(torch.ones(1), async_op=True)
            assert pending is not None
            end_foreign_waits()
            with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer|Broken pipe"):
                pending.wait(timedelta(seconds=20))
        own.sendall(b"stays")
        with peer:
            assert peer.recv(5) == b"stays"
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_a_wait_for_ranks_to_connect(size: int, lazy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the group is made; where Gloo connects late, in the first operation."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    hvd.init()
    asked, errors = Event(), []
    store = AbsentRanks(asked.set)  # C++ does not keep its Python side

    def wait() -> None:
        try:
            group = c10d.ProcessGroupGloo(store, 0, size, timedelta(minutes=2))
            group.allreduce([torch.ones(1)]).wait()
        except RuntimeError as error:
            errors.append(str(error))

    waits = Thread(target=wait)
    waits.start()
    until(asked.is_set)

    def ended() -> bool:
        end_foreign_waits()  # again: it may have come before the wait
        waits.join(0.1)
        return not waits.is_alive()

    until(ended)
    assert re.search("closed by peer|reset by peer|Broken pipe", errors[0]), errors
    hvd.barrier()
    hvd.shutdown()
