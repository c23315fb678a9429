"""The ranks of these jobs are forks: most of their time would be that they import torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.forked_ranks import ForkServer


@pytest.fixture(scope="package", autouse=True)
def _ranks(fork_server: ForkServer) -> Iterator[None]:
    with fork_server.used():
        yield
