"""Files that rank 0 reads, or writes completely or not at all, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ring_notebook.api.basics import rank
from ring_notebook.api.objects import broadcast_object
from ring_notebook.errors import RingError
from ring_notebook.files.private_files import make_private_folder, open_own
from ring_notebook.files.whole_file import is_whole, whole_file
from ring_notebook.text.error_text import cause_text, error_text


def write_on_rank_0(path: Path, write: Callable[[IO[bytes]], object], *, private: bool) -> None:
    """Have rank 0 ``write`` the file at ``path``, as `whole_file` does; the other ranks return at once.

    Folders that are missing are made. With ``private`` they and the file are readable by this user only.
    """
    if rank() != 0:
        return
    if private:
        make_private_folder(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, private=private) as file:
        write(file)


def read_on_rank_0(path: Path, read: Callable[[IO[bytes]], Any], *, private: bool) -> Any:
    """Have rank 0 ``read`` the file at ``path``; returns the result on all ranks. All ranks must call this.

    With ``private`` the file must belong to this user or root, and have a checksum. If reading fails, rank 0 raises the
    error (RingError for a wrong checksum), and the other ranks raise RingError.
    """
    found: Any = None
    reason, failure = "", None
    if rank() == 0:
        try:
            with open_own(path) if private else open(path, "rb") as file:
                if is_whole(file) in ((False, None) if private else (False,)):
                    raise RingError("it is damaged: its content does not match its checksum")
                found = read(file)
        except Exception as error:
            failure, reason = error, f"{type(error).__name__}: {error_text(error)}"
    found, reason = broadcast_object((found, reason), name=path.name)
    if failure is not None:
        raise failure
    if reason:
        raise RingError(f"rank {rank()}: rank 0 cannot load {path}: {reason}")
    return found


def from_rank_0(make: Callable[[], Any], name: str) -> tuple[Any, str]:
    """Call ``make`` on rank 0; returns its result on all ranks, and why it failed ("" after success)."""
    made, reason = None, ""
    if rank() == 0:
        try:
            made = make()
        except Exception as error:
            reason = cause_text(error)
    found: tuple[Any, str] = broadcast_object((made, reason), name=name)
    return found
