"""The compiled core: loaded once, with the settings of this process, and typed."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol
from warnings import warn

from ring_notebook.config import config
from ring_notebook.errors import CoreMissingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ring_notebook import _core

__all__ = ["Core", "core", "options"]


class Core(Protocol):
    """What this package uses of ``ring_notebook._core``, with the types of ``_core.pyi``."""

    Communicator: type[_core.Communicator]
    Domain: type[_core.Domain]
    Header: type[_core.Header]
    MemberGroup: type[_core.MemberGroup]
    Options: type[_core.Options]
    Staging: type[_core.Staging]
    TensorReader: type[_core.TensorReader]
    Update: type[_core.Update]

    def buffer_info(self, data: object) -> tuple[int, tuple[int, ...], str, bool]: ...
    def choose(self, headers: Sequence[_core.Header], hosts: int) -> _core.Path: ...
    def chunk_range(self, count: int, size: int, index: int, item: int) -> tuple[int, int]: ...
    def fuse(self, operations: Sequence[Sequence[_core.Header]], threshold: int) -> list[list[int]]: ...
    def ready_names(
        self, size: int, rounds: Sequence[Sequence[tuple[int, Sequence[tuple[str, int]]]]]
    ) -> list[list[str]]: ...
    def control_group_left(self, root: str, group: str) -> int: ...
    def isa(self) -> str: ...
    def memory_left(self) -> int: ...
    def memory_link(self, domain: _core.Domain, offset: int) -> _core.Link: ...
    def mpi_link(
        self,
        module_path: str,
        comm: int,
        byte: int,
        handle_bytes: int,
        any_source: int,
        any_tag: int,
        tag_limit: int,
    ) -> _core.Link: ...
    def traffic(self, path: _core.Path, hosts: int, local: int, bytes: int) -> tuple[int, int]: ...
    def layout_hash(self, shapes: Sequence[Sequence[int]]) -> int: ...
    def paths(self) -> list[_core.Path]: ...
    def receive(
        self,
        communicator: _core.Communicator,
        data: int,
        count: int,
        dtype: int,
        source: int,
        tag: int,
        timeout: float,
        attended: bool,
    ) -> _core.Message: ...
    def reserve_memory_link(self, domain: _core.Domain) -> int: ...
    def ring_plan(self, hosts: int, host: int) -> list[tuple[int, int, bool]]: ...
    def select_isa(self, isa: str) -> str: ...
    def send(
        self,
        communicator: _core.Communicator,
        data: int,
        count: int,
        dtype: int,
        to: int,
        tag: int,
        timeout: float,
        attended: bool,
    ) -> _core.Message: ...


@lru_cache(maxsize=1)
def core() -> Core:
    """The ``ring_notebook._core`` extension module, which reduces with the instructions of ``RING_ISA``.

    Warns where the processor lacks these. Raises CoreMissingError when the module is not compiled.
    """
    try:
        from ring_notebook import _core
    except ImportError as error:
        raise CoreMissingError(
            f"the native core of Ring Notebook cannot be loaded ({error}). "
            "Compile it with `pip install -e .` in a clone, or `pip install --force-reinstall ring-notebook`."
        ) from error
    select_instructions(_core, config().isa)
    return _core


def select_instructions(module: Core, asked: str) -> None:
    """Have ``module`` reduce with these instructions; warn where the processor lacks them."""
    used = module.select_isa(asked)
    if asked and used != asked:
        warn(f"RING_ISA={asked}: this processor has no {asked}; {used} is used", RuntimeWarning, stacklevel=3)


def options(*, warns: bool = True) -> _core.Options:
    """The settings of an epoch. ``warns`` where standard error is to say which operations wait for long."""
    settings = config()
    return core().Options(
        wire=settings.wire,
        staging=settings.staging,
        inline_bytes=settings.inline,
        segment_bytes=settings.segment,
        spin=settings.spin,
        stall_warning=settings.stall_warning if warns else 0.0,
        fusion_threshold=settings.fusion_threshold,
    )
