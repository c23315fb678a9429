"""Environments that have nothing but what pip brings with some extras, without a download: links to what is here."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["environment", "with_requirements"]


def environment(folder: Path, wanted: str, dependencies: bool = True) -> Path:
    """The Python of a new environment in ``folder`` with what is ``wanted``, and what that requires."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    here = Path(sysconfig.get_path("purelib"))
    site = folder / here.relative_to(sys.prefix)
    for name in with_requirements(wanted) if dependencies else {Requirement(wanted).name}:
        for top in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(here / top)
    return folder / "bin" / "python"


def with_requirements(wanted: str) -> set[str]:
    """The names of all distributions that pip would install; those that this environment has, which has them all."""
    found: set[tuple[str, str]] = set()
    ahead = [Requirement(wanted)]
    while ahead:
        requirement = ahead.pop()
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in found:
                continue
            try:
                needed = [Requirement(one) for one in distribution(requirement.name).requires or ()]
            except PackageNotFoundError:  # of another platform, or a CUDA package of torch
                continue
            found.add((requirement.name, extra))
            ahead += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}
