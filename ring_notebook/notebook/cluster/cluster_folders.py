"""The folders of running clusters: another kernel finds a cluster by its folder; folders of ended ones are removed.

They are not in the notebook's folder, which `git clean` empties, but in the user's runtime directory of this host or a
private temporary folder. Each folder of notebooks has its own folder there.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from ring_notebook.errors import ClusterError
from ring_notebook.files.private_files import changed_by_others, is_own, make_private_folder, owner_of, temporary_folder
from ring_notebook.files.run_folders import runs_directory
from ring_notebook.machine.process_life import age, began, is_alive
from ring_notebook.notebook.record.run_files import notebook, read_json, write_json
from ring_notebook.notebook.run.takeover import journals_of
from ring_notebook.text.words import plural

_FILE = "cluster.json"
_NAME = re.compile(r"\d+-[0-9a-f]{8}-")  # the kernel's process id first; other folders are not ours


def new_directory(keep: bool = False) -> Path:
    """Make a folder for the files of a new cluster of this kernel; remove folders of clusters that have ended.

    With ``keep`` the cluster may outlive the user's last session. Raises as `check_folder`, and ClusterError where this
    user cannot write.
    """
    check_folder()
    for directory in _directories():
        if not _in_use(directory):
            remove(directory)
    root = _roots()[-1 if keep else 0]
    directory = root / f"{os.getpid()}-{uuid.uuid4().hex[:8]}-{socket.gethostname()}"
    try:
        make_private_folder(runs_directory())
        for name in ("log", "security"):  # ipyparallel would create them with a mode from the umask
            with suppress(FileNotFoundError):  # another kernel has just removed the folder above, which was empty
                make_private_folder(directory / name)
            make_private_folder(directory / name)
    except OSError as error:
        raise ClusterError(
            f"cannot make {error.filename}: {error.strerror}{_whose()}. Runs are recorded in the "
            "notebook's folder: `%cd` into one that you can write, such as `%cd ~`, or set RING_RUNS_DIR before the "
            "kernel starts"
        ) from None
    return directory


def own_folder() -> Path:
    """The private folder, with a short path, for files of running notebooks of this folder; made if missing.

    Raises as `check_folder`.
    """
    check_folder()
    folder = _roots()[0]
    make_private_folder(folder)
    return folder


def remove(directory: Path) -> None:
    """Remove the folder of an ended cluster, its ranks' records, and the folders above them if these are empty."""
    kept = journals_of(directory)
    for folder in (directory, kept):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        kept.parent.rmdir()
    with suppress(OSError):
        directory.parent.rmdir()
        directory.parent.parent.rmdir()


def check_folder() -> None:
    """Raise ClusterError if another user could replace the files of a cluster or its runs."""
    folders = [(runs_directory().parent, "RING_RUNS_DIR")] if runs_directory().parent.name == ".ring" else []
    folders += zip((root.parent for root in reversed(_roots())), ("TMPDIR", "XDG_RUNTIME_DIR"), strict=False)
    for folder, setting in folders:
        if how := changed_by_others(folder):
            raise ClusterError(
                f"{how}, or set {setting} to a folder of your own: a user who can change the "
                "files of a cluster can run code as its owner"
            )


def write(directory: Path, about: dict[str, Any]) -> None:
    """Describe the cluster in ``directory``; ``about`` holds at least the ``controller``'s process id.

    Adds the kernel, the start of its process, its notebook and the time of the first description.
    """
    make_private_folder(directory)  # somebody may have removed it
    started = read(directory).get("started", time.time())
    own = {"kernel": os.getpid(), "began": began(os.getpid()), "notebook": notebook(), "started": started}
    write_json(directory / _FILE, {**about, **own})


def read(directory: Path) -> dict[str, Any]:
    """What `write` wrote; empty when the file is missing, truncated, foreign or unreadable."""
    try:
        about = read_json(directory / _FILE)
    except (OSError, ValueError):
        return {}
    kinds = {
        "n": int,
        "why": str,
        "keep": bool,
        "met": bool,
        "formation": int,
        "controller": int,
        "launcher": int,
        "kernel": int,
        "began": int,
        "notebook": str,
        "started": float,
        "engines": list,
    }
    return about if all(isinstance(about.get(name), kind) for name, kind in kinds.items()) else {}


def has_kernel(about: dict[str, Any]) -> bool:
    """Whether the kernel that has started the cluster, or was the last to attach to it, lives."""
    return is_alive(about["kernel"], about["began"])


def lives(cluster: str, since: float) -> bool | None:
    """Whether the cluster of this name lives, or a kernel that may have had it at ``since``, in seconds since the
    epoch. None for a cluster of another host, whose processes cannot be seen here.
    """
    named = _NAME.match(cluster)
    if named is None or cluster[named.end() :] != socket.gethostname():
        return None
    kernel = int(cluster.partition("-")[0])
    if is_alive(kernel) and age(kernel) > time.time() - since:
        return True
    for directory in _directories():
        if directory.name == cluster and (about := read(directory)):
            return has_kernel(about) or is_alive(about["controller"])
    return False


def left_behind() -> dict[str, Any]:
    """What `read` gives for the newest cluster that an earlier kernel of this notebook left running, and its ``id``.

    Empty without one. If the front end does not name the notebook, any notebook of this folder counts.
    """
    for directory in running():
        about = read(directory)
        if about and about["keep"] and not has_kernel(about) and about["notebook"] in ("", notebook()):
            return {**about, "id": _id(directory)}
    return {}


def to_attach_to(which: str = "") -> list[Path]:
    """The folders of the clusters that an attach may mean, in the order to try them.

    With ``which``, the beginning of an id or the name of a notebook: those that match. Without: those of this kernel
    and of earlier kernels of this notebook, newest first; else the one that another notebook has kept. Raises
    ClusterError, with a list, if several match, or if all belong to open notebooks.
    """
    found = [(directory, about) for directory in running() if (about := read(directory))]
    found = [(directory, about) for directory, about in found if about["keep"] or has_kernel(about)]  # others end now
    if which:
        named = [
            directory
            for directory, about in found
            if _id(directory).startswith(which) or which in (about["notebook"], Path(about["notebook"]).name)
        ]
        if len(named) == 1:
            return named
        what = f"several running clusters are named {which}" if named else f"no running cluster is named {which}"
        raise ClusterError(_listed(what, found))
    own = [directory for directory, about in found if about["kernel"] == os.getpid() or _left_here(about)]
    kept = [directory for directory, about in found if about["keep"] and not has_kernel(about)]
    if own or len(kept) == 1:
        return own or kept
    if kept:
        raise ClusterError(_listed("several notebooks have kept a cluster", found))
    if found:
        raise ClusterError(_listed("the clusters of this folder belong to notebooks that are open", found))
    return []


def _left_here(about: dict[str, Any]) -> bool:
    return about["notebook"] != "" and about["notebook"] == notebook() and not has_kernel(about)


def _id(directory: Path) -> str:
    return directory.name.split("-")[1]


def _listed(what: str, found: list[tuple[Path, dict[str, Any]]]) -> str:
    lines = [what + ("; `%ring attach ID` attaches to one:" if found else "")]
    for directory, about in found:
        began_at = time.strftime("%H:%M:%S", time.localtime(about["started"]))
        whose = f"{about['notebook'] or 'a notebook'}, {'which is open' if has_kernel(about) else 'kept'}"
        lines.append(f"  {_id(directory)}  {plural(about['n'], 'engine')}, started at {began_at} by {whose}")
    return "\n".join(lines)


def running() -> Iterator[Path]:
    """The folders of the clusters that seem to run, those of this notebook first, newest first."""
    found = []
    for directory in _directories():
        with suppress(OSError):  # starting, removed by the kernel that has ended it, or closed to us: root's
            written = (directory / _FILE).stat().st_mtime
            if _in_use(directory):
                found.append((read(directory).get("notebook") == notebook(), written, directory))
    yield from (directory for _, _, directory in sorted(found, reverse=True))


def _roots() -> list[Path]:
    """The folders with the clusters of this folder of notebooks: in the runtime directory, if any, and a lasting one.

    The system empties the runtime directory when the user's last session ends.
    """
    lasting = Path(temporary_folder(), f"ring-notebook-{os.geteuid()}")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(runtime, "ring-notebook")] if runtime and os.access(runtime, os.W_OK) else []
    name = sha256(os.fsencode(runs_directory().parent)).hexdigest()[:12]
    return [folder / name for folder in (*own, lasting)]


def _directories() -> list[Path]:
    """The folders of this user's clusters on this host.

    Not those of other hosts that share the disk: their process ids mean nothing here. Not those of other users, who
    could make us attach to a cluster that sends malicious pickles.
    """
    host = glob.escape(socket.gethostname())
    with suppress(OSError):  # another user owns the folder and denies access
        found = [path for root in _roots() for path in root.glob(f"*-*-{host}")]
        return [path for path in found if _NAME.match(path.name) and path.is_dir() and is_own(path)]
    return []


def _whose() -> str:
    ring = runs_directory().parent
    if not os.path.lexists(ring) or ring.lstat().st_uid == os.geteuid():
        return ""
    return f" ({ring} belongs to {owner_of(ring)})"


def _in_use(directory: Path) -> bool:
    kernel = int(directory.name.partition("-")[0])
    return is_alive(kernel) or is_alive(read(directory).get("controller", 0))
