"""Names that a user may type in this notebook: of the ranks, of runs, of knobs, of snapshots."""

from __future__ import annotations

import contextlib
import re

from ring_notebook.errors import ClusterError, RingError
from ring_notebook.files import snapshot_files
from ring_notebook.notebook.run import catalogue
from ring_notebook.notebook.session.session import Session

_NAME = re.compile(r"[^\W\d]\w*(\.\w*)*$")


def names_on_rank_0(session: Session, path: str = "") -> list[str]:
    """The names on rank 0 (after ``path`` and a dot, if given); the last known ones if it is slow to answer."""
    if session.cluster is not None and session.cluster.running:
        with contextlib.suppress(ClusterError):
            session.known_names[path] = session.cluster.names(path)
    return session.known_names.get(path, [])


def names_of_ranks(session: Session, begun: str) -> list[str]:
    """The names on the ranks that begin with ``begun``, a name or a path of names with dots."""
    if begun and not _NAME.match(begun):
        return []
    path, dot, last = begun.rpartition(".")
    names = names_on_rank_0(session, path)
    shown = names if last.startswith("_") else [name for name in names if not name.startswith("_")]
    return [f"{path}{dot}{name}" for name in shown if name.startswith(last)]


def help_on_rank_0(session: Session, path: str) -> str:
    """Signature and documentation of a name on rank 0, also while a run is in progress; empty if it has none."""
    if session.cluster is not None and session.cluster.running:
        with contextlib.suppress(ClusterError):
            return session.cluster.help(path)
    return ""


def runs(_session: Session, _begun: str) -> list[str]:
    """The names of runs on disk."""
    return catalogue.names()


def runs_in_progress(session: Session, _begun: str) -> list[str]:
    """The names of runs that have not ended."""
    return [run.log.title for run in session.in_progress]


def knobs(session: Session, _begun: str) -> list[str]:
    """The knobs of runs in progress, as they are set."""
    return [f"{name}=" for run in session.in_progress for name in run.view.knobs]


def snapshots(_session: Session, _begun: str) -> list[str]:
    """The names of snapshots."""
    with contextlib.suppress(OSError, RingError):
        return [one.name for one in snapshot_files.found(snapshot_files.root())[0]]
    return []
