"""Copies variables between the notebook and its ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle

from ring_notebook.errors import ClusterError
from ring_notebook.notebook.engines import Engines

__all__ = ["describe", "help_on", "names", "pull", "push"]

_RANK_SIDE = "ring_notebook.engine.namespace"
_SECONDS_TO_NAME = 2.0  # the user has pressed Tab and waits


def push(engines: Engines, variables: Mapping[str, Any]) -> None:
    """Copy ``variables`` to every rank. Raises ClusterError that names one that cannot be pickled."""
    try:
        pickled = cloudpickle.dumps(dict(variables))
    except Exception as error:
        raise ClusterError(f"{_culprit(variables)} cannot be pickled for the ranks: {error}") from None
    engines.call(f"{_RANK_SIDE}:put", pickled)


def _culprit(variables: Mapping[str, Any]) -> str:
    """The first of ``variables`` that cannot be pickled."""
    for name, value in variables.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"{name} ({type(value).__name__})"
    return ", ".join(variables)


def pull(engines: Engines, name: str, rank: int) -> Any:
    """The value of ``name`` on ``rank``. Raises ClusterError when it is missing or cannot be pickled."""
    if not 0 <= rank < len(engines.all):
        raise ClusterError(f"there is no rank {rank}; the cluster has ranks 0-{len(engines.all) - 1}")
    (data,) = engines.call(f"{_RANK_SIDE}:get", name, ranks=[rank])
    return pickle.loads(data)


def describe(engines: Engines, name: str = "") -> list[dict[str, str]]:
    """Descriptions of the variable ``name`` (of all variables without it) by name: one dict per rank.

    Empty for ranks that have died.
    """
    living = engines.living()
    found = dict(zip(living, engines.call(f"{_RANK_SIDE}:describe", name, ranks=living), strict=True))
    return [found.get(rank, {}) for rank in range(len(engines.all))]


def names(engines: Engines, path: str = "") -> list[str]:
    """The names on the first living rank, or those after ``path`` and a dot.

    Raises ClusterError when that rank does not answer fast.
    """
    first = engines.living()[:1]
    found: list[str] = engines.call(f"{_RANK_SIDE}:names", path, ranks=first, timeout=_SECONDS_TO_NAME)[0]
    return found


def help_on(engines: Engines, path: str) -> str:
    """Signature and documentation of a name on rank 0; empty where it has no such name or does not answer fast."""
    first = engines.living()[:1]
    return str(engines.call_beside(f"{_RANK_SIDE}:help_on", path, ranks=first, timeout=_SECONDS_TO_NAME)[0] or "")
