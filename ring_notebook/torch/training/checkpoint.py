"""Checkpoints: rank 0 writes them whole or not at all, and reads them for everybody."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ring_notebook.api.basics import rank
from ring_notebook.api.objects import broadcast_object
from ring_notebook.errors import RingError
from ring_notebook.files.private_files import make_private_folder, open_own
from ring_notebook.files.whole_file import is_whole, whole_file


def save(obj: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write ``obj`` (as `torch.save`) to ``path`` on rank 0; the other ranks return at once.

    The file appears complete or not at all: it is written beside ``path``, synced to disk and renamed. What an earlier
    call has left there that was killed goes. A checksum at its end lets `load` find damage; `torch.load` ignores it.
    With ``private`` the file, and the folders that this makes, are readable by this user only, whatever the umask.
    """
    if rank() != 0:
        return
    target = Path(path)
    if private:
        make_private_folder(target.parent)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target, private=private) as file:
        torch.save(obj, file)


def load(path: str | os.PathLike[str], weights_only: bool = True, *, private: bool = False) -> Any:
    """What `save` wrote, on every rank, with its tensors in CPU memory; only rank 0 needs to see the file.

    All ranks must call this, and all raise when rank 0 cannot read the file, or its checksum says that it is damaged.
    ``weights_only`` is `torch.load`'s: with False the file may run code when it is read. With ``private`` it must be
    this user's or root's, and have a checksum, which files of `torch.save` lack.
    """
    loaded: tuple[Any, str] = (None, "")
    failure: Exception | None = None
    if rank() == 0:
        try:
            with open_own(Path(path)) if private else open(path, "rb") as file:
                if is_whole(file) in ((False, None) if private else (False,)):
                    raise RingError("it is damaged: its content does not match its checksum")
                loaded = (torch.load(file, map_location="cpu", weights_only=weights_only), "")
        except Exception as error:
            failure = error
            loaded = (None, f"{type(error).__name__}: {error}")
    obj, reason = broadcast_object(loaded, name="checkpoint")
    if failure is not None:
        raise failure
    if reason:
        raise RingError(f"rank {rank()}: rank 0 cannot load {path}: {reason}")
    return obj
