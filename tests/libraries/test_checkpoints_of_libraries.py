"""Checkpoints of a model of peft in a bucket of S3, which moto serves on this machine.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None, reason="in an environment of its own: make test-libraries"
)
PROGRAM = Path(__file__).with_name("checkpoint_program.py")
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """S3 on loopback, with a bucket."""
    from moto.server import ThreadedMotoServer

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server: Any = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    import s3fs

    s3fs.S3FileSystem(endpoint_url=f"http://{host}:{port}").mkdir("bucket")
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.filterwarnings("ignore")  # of botocore and werkzeug
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_resume_from_a_bucket(endpoint: str, ranks: int) -> None:
    """Bit for bit, with dropout; without the frozen weights, and with the older ones removed."""
    command = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", str(ranks)]
    done = subprocess.run(
        [*command, sys.executable, "-W", "ignore", PROGRAM, "s3://bucket/run"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | KEYS | {"FSSPEC_S3_ENDPOINT_URL": endpoint, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("rank ")] == []
