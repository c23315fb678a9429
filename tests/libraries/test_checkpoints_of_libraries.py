"""Checkpoints in a bucket of S3, which moto serves on this machine: of a model of peft, and when a rank is killed.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import programs
from jobs.torch.test_sharded_checkpoints import reports, ringrun, samples

pytestmark = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None, reason="in an environment of its own: make test-libraries"
)
PROGRAM = Path(__file__).with_name("checkpoint_program.py")
RANKS = (1, 2)
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """S3 on loopback, with a bucket for each number of ranks."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server: Any = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in KEYS.items():
                patch.setenv(name, value)
            buckets = s3fs.S3FileSystem(endpoint_url=f"http://{host}:{port}")
            for ranks in RANKS:
                buckets.mkdir(f"bucket-{ranks}")
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore")  # of botocore and werkzeug
@pytest.mark.parametrize("ranks", RANKS)
def test_adapters_resume_from_a_bucket(endpoint: str, ranks: int) -> None:
    """Bit for bit, with dropout; without the frozen weights, and with the older ones removed."""
    env = os.environ | KEYS | {"FSSPEC_S3_ENDPOINT_URL": endpoint, "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-W", "ignore", PROGRAM, f"s3://bucket-{ranks}/run"]
    done = programs.ringrun("-np", str(ranks), *program, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-5000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("rank ")] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)  # two jobs, each of which may take 200 s on a busy machine
@pytest.mark.parametrize(("kind", "ranks", "then"), [("plain", 3, 2), ("fsdp, background", 2, 3)])
def test_a_rank_is_killed_while_it_writes(
    endpoint: str, kind: str, ranks: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before is whole. Other ranks continue from it, with each sample once."""
    for name, value in (KEYS | {"FSSPEC_S3_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(name, value)
    url = f"s3://bucket-{RANKS[0]}/{kind[:5]}"
    done = ringrun(ranks, kind, url, "die")
    assert "rank 1" in done.stderr
    again = ringrun(then, kind, url, "read")
    assert again.returncode == 0, again.stderr
    assert reports(again) == [reports(done)[0]] * then
    assert sorted(samples(done) + samples(again)) == list(range(72))
