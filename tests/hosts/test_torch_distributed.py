"""Backend "ring" of torch.distributed over the link of two namespaces."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.two_hosts import NAMES, TwoHosts

PROGRAM = Path(__file__).with_name("torch_distributed.py")


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [(1, 1), (2, 1), (2, 2)])
def test_over_the_link(hosts: TwoHosts, per_host: tuple[int, int]) -> None:
    """Two ranks with two dtypes; three and four with every one."""
    every = [] if per_host == (1, 1) else ["every dtype"]
    said = hosts.run([str(PROGRAM), *every], per_host=per_host)
    assert said.count("on 2 hosts: all is well") == sum(per_host)


@pytest.mark.slow
def test_torchrun_on_both_is_told_to_be_ringrun(hosts: TwoHosts, tmp_path: Path) -> None:
    """Its ranks find each other on Gloo; on our backend every one of them says what to do, at once."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ones = torch.ones(1)\n"
        "dist.all_reduce(ones)\n"
        "print('gloo has', int(ones.item()), 'ranks', flush=True)\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('ring')\n"
    )
    job = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:29400"]
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", *job, str(script)])
    started = [
        subprocess.Popen(
            [str(hosts.folder / "launcher"), name, f"GLOO_SOCKET_IFNAME=link0 {command}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in NAMES
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for text in said:
        assert "gloo has 2 ranks" in text, text
        assert "torchrun started 2 ranks on 2 hosts" in text, text
        assert "ringrun -np 2 -H HOST:1,HOST:1" in text
