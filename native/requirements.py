"""What the package needs at run time; the build asks.

MPI comes as a wheel, so that pip alone is enough. ``RING_SITE_MPI=1 pip install .`` leaves it out where the site has an
MPI of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["dynamic_metadata"]

REQUIREMENTS = [
    "ipyparallel>=9.0",
    "mpi4py>=4.0",
    "ipywidgets>=8.1",
    "ipecharts>=1.4",
    "ipylab>=1.1",
    "cloudpickle>=3.0",
    "psutil>=5.9",
    "nvidia-ml-py>=12",
    "jupyterlab>=4.0",
    # No upper bound and no index: a torch (CPU or CUDA) that is installed stays.
    "torch>=2.2",
]
MPI = "mpich>=4.2; sys_platform == 'linux'"


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> list[str]:
    """The value of ``dependencies`` (scikit-build-core's provider interface)."""
    if field != "dependencies" or settings:
        raise ValueError(f"only dependencies without settings are given here, not {field} with {dict(settings)}")
    return REQUIREMENTS if os.environ.get("RING_SITE_MPI") else [*REQUIREMENTS, MPI]
