"""Headers of CUDA, and NCCL with its header, from NVIDIA's packages: what `make test-nvidia` fetches."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".nvidia"
PACKAGES = [line for line in (Path(__file__).parent / "requirements.txt").read_text().split() if line]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each package of the kind that the test asks for."""
    for kind in ("cuda", "nccl"):
        if kind in metafunc.fixturenames:
            metafunc.parametrize(kind, [one for one in PACKAGES if kind in one], indirect=True)


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Path:
    """The folder of a ``cuda.h``."""
    return found(request.param, "cuda.h").parent


@pytest.fixture
def nccl(request: pytest.FixtureRequest) -> Path:
    """The folder of an NCCL, with `include` and `lib`."""
    return found(request.param, "nccl.h").parents[1]


def found(package: str, file: str) -> Path:
    """That file of the package."""
    files = sorted((FETCHED / package).rglob(file))
    if not files:
        pytest.skip(f"{package} is not here: make test-nvidia fetches it")
    return files[0]
