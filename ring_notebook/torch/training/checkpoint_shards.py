"""Shards of a checkpoint, written and read by each rank with torch.distributed.checkpoint.

The ranks agree on a plan when a checkpoint is due, because all are then at the same place of the loop. After that each
rank writes its own files and waits for nobody, so that a thread can do it while the training continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ring_notebook.api.basics import rank, size
from ring_notebook.api.objects import allreduce_numbers, gather_objects
from ring_notebook.api.process_sets import global_process_set
from ring_notebook.api.rank_0_files import from_rank_0
from ring_notebook.core.communicator import ReduceOp
from ring_notebook.errors import RingError
from ring_notebook.files.checkpoint_folder import LocalFolder
from ring_notebook.files.private_files import open_own
from ring_notebook.files.remote_folder import RemoteFolder

METADATA = ".metadata"  # torch's name of the file with the index of the others


class _RemoteFiles(FileSystemBase):
    """The files of a remote folder, for torch's reader and writer."""

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder = folder
        self._files: Any = folder.file_system

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._files.open(self._folder.inside(str(path)), mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._files.mv(self._folder.inside(str(path)), self._folder.inside(str(new_path)))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._files.makedirs(self._folder.inside(str(path)), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        there: bool = self._files.exists(self._folder.inside(str(path)))
        return there

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._files.rm(self._folder.inside(str(path)))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        there: list[str] = self._files.ls(self._folder.inside(str(path)), detail=False)
        return there


class _Planner(DefaultSavePlanner):
    """Gives the writer the copies of tensors, if there are any, and counts the tensors that it has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[MetadataIndex, Tensor] | None = None
        self.taken = 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.taken += 1
        return super().lookup_object(index) if self.copies is None else self.copies[index]


class Shards:
    """This rank's part of the checkpoints of one training, in ``folder``."""

    def __init__(self, folder: LocalFolder | RemoteFolder) -> None:
        self._folder = folder
        self._planner = _Planner()
        self._local: SavePlan | None = None
        self._ranks = (0, 0)  # this rank and the number of ranks for which `_local` was made
        self._plans: list[SavePlan] = []
        self._metadata: Metadata | None = None
        self._buffers: dict[MetadataIndex, Tensor] = {}

    @property
    def taken(self) -> int:
        """Number of tensors passed to the writer; it grows while the disk makes progress."""
        return self._planner.taken

    def plan(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Agree on which rank writes which of ``tensors``, by name; all ranks call this.

        One rank writes a tensor that several have, so that all write about equally much. Raises RingError on all ranks
        if their tensors do not fit together.
        """
        self._planner = _Planner()
        self._planner.set_up_planner(dict(tensors), None, rank() == 0)
        local = self._planner.create_local_plan()
        is_known = self._ranks == (rank(), size()) and local == self._local
        if allreduce_numbers([int(is_known)], ReduceOp.MIN, "plan of a checkpoint is known")[0]:
            return
        plans = gather_objects(local, "plans of a checkpoint", global_process_set)

        def whole() -> Any:
            made, metadata = _Planner().create_global_plan(plans)
            return self._writer(".").prepare_global_plan(made), metadata

        made, reason = from_rank_0(whole, "plan of a checkpoint")
        if reason:
            raise RingError(f"rank {rank()}: rank 0 cannot plan the checkpoint: {reason}")
        self._plans, self._metadata = made
        self._local, self._ranks = local, (rank(), size())
        self._buffers = {}

    def copy(self) -> None:
        """Copy what this rank writes to host memory (pinned for tensors on CUDA devices), which is reused."""
        copies, cuda = {}, False
        for item in self._plans[rank()].items:
            tensor = self._planner.lookup_object(item.index)
            if (buffer := self._buffers.get(item.index)) is None:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                self._buffers[item.index] = buffer
            copies[item.index] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
            cuda |= tensor.is_cuda
        if cuda:
            torch.cuda.synchronize()
        self._planner.copies, self._planner.taken = copies, 0

    def write(self, begun: str) -> list[WriteResult]:
        """Write this rank's part to ``begun``, which `LocalFolder.begin` has made. Raises what the disk raises."""
        writer = self._writer(begun)
        writer.set_up_storage_writer(rank() == 0)
        writer.prepare_local_plan(self._plans[rank()])
        done: list[WriteResult] = writer.write_data(
            self._planner.finish_plan(self._plans[rank()]), self._planner
        ).value()
        return done

    def finish(self, begun: str, parts: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written: write the index of all files.

        Raises RingError if rank 0 does not see the files of another rank.
        """
        for owner, part in enumerate(parts):
            names = {name for one in part if (name := getattr(one.storage_data, "relative_path", ""))}
            if lacking := next((name for name in names if not self._folder.has(begun, name)), ""):
                raise RingError(
                    f"rank 0 does not see {lacking}, which rank {owner} has written to {begun}; take a folder on a "
                    "disk that all hosts share, or a place such as s3://"
                )
        assert self._metadata is not None
        writer = self._writer(begun)
        writer.set_up_storage_writer(True)
        writer.finish(replace(self._metadata), parts)

    def _writer(self, path: str) -> FileSystemWriter:
        if isinstance(self._folder, LocalFolder):
            return FileSystemWriter(path)
        writer: Any = FileSystemWriter(".", sync_files=False)
        writer.fs = _RemoteFiles(self._folder)
        writer.path = path
        return writer  # type: ignore[no-any-return]

    def read(self, path: str, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Fill ``tensors`` from the shards at ``path``; for None, make a whole tensor in host memory.

        Each rank reads its part of tensors that are sharded now. Raises the errors of torch and the disk.
        """
        if isinstance(self._folder, LocalFolder):
            open_own(Path(path, METADATA)).close()  # it must be ours: reading it could run another user's code
            reader: Any = FileSystemReader(path)
        else:
            reader = FileSystemReader(".")
            reader.fs = _RemoteFiles(self._folder)
            reader.path = path
        metadata = reader.read_metadata()
        filled: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor is None:
                about = metadata.state_dict_metadata[name]
                assert isinstance(about, TensorStorageMetadata)
                tensor = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
            filled[name] = tensor
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(filled), metadata, False)
        reader.set_up_storage_reader(metadata, False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return filled
