"""The fakes are compiled before any test forks ranks, which would each compile them."""

from __future__ import annotations

import pytest

from native.fakes.device import CUDA, NCCL


@pytest.fixture(scope="session", autouse=True)
def _fakes() -> None:
    NCCL(), CUDA()
