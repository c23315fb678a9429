"""Types of the native core; tests/native/test_stub.py compares them with the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_Piece = tuple[int, int, int]
"""Address of the input, address of the output (0 where there is none), elements."""

def isa() -> str: ...
def select_isa(isa: str) -> str: ...
def memory_left() -> int: ...
def control_group_left(root: str, group: str) -> int: ...
def buffer_info(data: object) -> tuple[int, tuple[int, ...], str, bool]: ...
def paths() -> list[Path]: ...
def choose(headers: Sequence[Header], hosts: int) -> Path: ...
def chunk_range(count: int, size: int, index: int, item: int) -> tuple[int, int]: ...
def ring_plan(hosts: int, host: int) -> list[tuple[int, int, bool]]: ...
def mpi_link(
    module_path: str, comm: int, byte: int, handle_bytes: int, any_source: int, any_tag: int, tag_limit: int
) -> Link: ...
def reserve_memory_link(domain: Domain) -> int: ...
def memory_link(domain: Domain, offset: int) -> Link: ...

class Options:
    def __init__(
        self,
        *,
        wire: str = ...,
        staging: str = ...,
        inline_bytes: int = ...,
        segment_bytes: int = ...,
        spin: float = ...,
    ) -> None: ...

class Header:
    def __init__(
        self,
        operation: str,
        *,
        dtype: int = ...,
        op: int = ...,
        device: int = ...,
        is_inline: bool = ...,
        input_in_ring: bool = ...,
        output_in_ring: bool = ...,
        root: int = ...,
    ) -> None: ...

class Path:
    @property
    def operation(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def between_hosts(self) -> bool: ...
    @property
    def gates(self) -> str: ...
    @property
    def bytes(self) -> str: ...
    @property
    def messages(self) -> str: ...

class Region:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Domain:
    @staticmethod
    def create(local_rank: int, local_size: int, arena: int = ...) -> Domain: ...
    @staticmethod
    def attach(local_rank: int, local_size: int, pid: int, fd: int, token: int) -> Domain: ...
    def share(self, local_rank: int) -> Domain: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def allocated(self) -> int: ...
    @property
    def cores(self) -> int: ...
    def trim(self) -> None: ...
    def dead(self, local_rank: int) -> bool: ...
    def leave_run(self, run: int) -> None: ...
    def agree_on_members(
        self, candidates: Sequence[int], last: int, run: int, without_dead: bool, timeout: float
    ) -> tuple[int, list[int]]: ...
    def allocate(self, bytes: int) -> Region: ...

class Staging:
    def __init__(self, options: Options) -> None: ...
    def past_cache(self, bytes: int) -> bool: ...
    def took(self, past_cache: bool, bytes: int, ns: int) -> None: ...

class Link:
    def drain(self) -> None: ...

class Update:
    def __init__(self) -> None: ...
    rule: int
    maximize: bool
    nesterov: bool
    first: bool
    decoupled: bool
    lr: float
    weight_decay: float
    momentum: float
    dampening: float
    beta1: float
    beta2: float
    eps: float
    bias1: float
    bias2_root: float

class Output:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Work:
    def wait(self, timeout: float = ...) -> None: ...
    def done(self) -> bool: ...
    def output(self) -> Output: ...
    def counts(self) -> list[int]: ...
    def last_joined(self) -> int: ...
    def subgroup(self) -> Communicator | None: ...

class Communicator:
    @staticmethod
    def open(
        domain: Domain,
        ranks: Sequence[int],
        local: Sequence[int],
        index: int,
        epoch: int,
        link: Link | None = ...,
        host_of: Sequence[int] = ...,
        addresses: Sequence[int] = ...,
        timeout: float = ...,
        run: int = ...,
        options: Options = ...,
    ) -> Communicator: ...
    @property
    def size(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def host_of(self) -> list[int]: ...
    @property
    def aborted(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def allreduce(
        self,
        input: int,
        output: int,
        shape: tuple[int, ...],
        dtype: int,
        device: int,
        op: int,
        prescale: float,
        postscale: float,
        name: str,
        timeout: float,
    ) -> None: ...
    def reduce(
        self,
        scatter: bool,
        pieces: Sequence[_Piece],
        shape: Sequence[int],
        layout: int,
        dtype: int,
        device: int,
        op: int,
        prescale: float,
        postscale: float,
        name: str,
        blocking: bool,
        timeout: float,
    ) -> Work: ...
    def allgather(
        self,
        piece: _Piece,
        shape: Sequence[int],
        dtype: int,
        device: int,
        name: str,
        blocking: bool,
        timeout: float,
    ) -> Work: ...
    def alltoall(
        self,
        piece: _Piece,
        shape: Sequence[int],
        splits: Sequence[int],
        dtype: int,
        device: int,
        name: str,
        blocking: bool,
        timeout: float,
    ) -> Work: ...
    def broadcast(
        self,
        piece: _Piece,
        shape: Sequence[int],
        root: int,
        dtype: int,
        device: int,
        name: str,
        blocking: bool,
        timeout: float,
    ) -> Work: ...
    def step(
        self,
        piece: _Piece,
        op: int,
        update: Update,
        options: int,
        first_state: int,
        second_state: int,
        name: str,
        timeout: float,
    ) -> Work: ...
    def barrier(self, name: str, blocking: bool, timeout: float) -> Work: ...
    def join(self, timeout: float) -> Work: ...
    def group(self, members: Sequence[int], timeout: float) -> Work: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def activity(self) -> list[dict[str, Any]]: ...
    def seconds_spent(self) -> float: ...
    def record(self, capacity: int) -> None: ...
    def recorded(self, end: bool = ...) -> list[tuple[int, int, str, str, str, int, int, int, int]]: ...
