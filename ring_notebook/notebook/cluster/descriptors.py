"""How many files the processes of a cluster may open: raised where that is allowed, else an error that says so."""

from __future__ import annotations

import resource

from ring_notebook.errors import ClusterError

__all__ = ["require_descriptors"]

_BASE, _PER_ENGINE = 128, 16  # the controller needs the most: about 100 for its ports, and 8 for each engine


def require_descriptors(n: int) -> None:
    """Let this process, and so its children, open the files that a cluster of ``n`` engines needs.

    Raises ClusterError when the hard limit is lower: libzmq ends its process when it cannot open a socket.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _BASE + _PER_ENGINE * n
    if _allows(soft, needed):
        return
    if not _allows(hard, needed):
        raise ClusterError(
            f"a cluster of {n} engines needs {needed} file descriptors, this process may have {hard}; start Jupyter "
            f"after `ulimit -n {max(1024, needed)}`, or ask for fewer engines"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
