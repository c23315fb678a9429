"""A store of torch.distributed in which all other ranks have an address but never connect."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["AbsentRanks"]


class AbsentRanks(dist.Store):
    """The address of the others is this rank's with the highest port: in Gloo the rank with the higher one connects."""

    def __init__(self, asked: Callable[[], object]) -> None:
        """``asked`` is called when this rank looks up the last other rank, before it waits for them."""
        super().__init__()
        self._asked = asked
        self._own = b""

    def set(self, key: str, value: Any) -> None:
        """Keep the address of this rank."""
        self._own = value

    def get(self, key: str) -> bytes:
        """This rank's address with the highest port."""
        if key.endswith("1"):
            self._asked()
        return re.sub(rb"\x02\0..\x7f\0\0\x01", b"\x02\0\xff\xff\x7f\0\0\x01", self._own, flags=re.DOTALL)

    def wait(self, *_arguments: object) -> None:
        """All ranks have come."""

    def has_extended_api(self) -> bool:
        """False: keys are requested one by one."""
        return False
