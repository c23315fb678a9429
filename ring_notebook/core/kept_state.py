"""The variables of a rank as one pickle, with the memory of tensors and arrays beside it, each stored once."""

from __future__ import annotations

import io
import pickle
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing.process import BaseProcess
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any

import cloudpickle

from ring_notebook.core import metrics
from ring_notebook.core.communicator import Communicator
from ring_notebook.core.steering import Knob, steering
from ring_notebook.frameworks import framework
from ring_notebook.protocol.knobs import Range, Value
from ring_notebook.text.error_text import error_text

_INLINE = 16 << 10  # bytes up to which memory stays in the file of its rank
_MOST_REASON = 200  # characters
_OF_FRAMEWORK = "random numbers of "
_OF_LOGICAL = "what logical ranks have of their own"  # stored among the variables; no variable can have this name


class Keeper:
    """How the objects of one framework are kept. A face registers its keeper when it is imported."""

    name: str
    """The framework's name in `ring_notebook.frameworks`."""

    def memory_of(self, value: Any) -> Memory | None:
        """The memory that ``value`` stands for, kept once for all objects that share it; None for other objects."""
        return None

    def with_memory(self, size: int, fill: Callable[[memoryview], object], about: Any) -> Any:
        """The object that `memory_of` described by ``about``, with ``size`` bytes that ``fill`` writes."""
        raise NotImplementedError

    def reduced(self, value: Any) -> Any:
        """As ``__reduce__``, for objects that pickle would not keep well; else NotImplemented."""
        return NotImplemented

    def unkeepable(self, value: Any) -> str:
        """What ``value`` is, in words, if no other process can have it, such as a GPU's stream; else empty."""
        return ""

    def loses(self, value: Any) -> str:
        """What a variable with this value loses, in words, such as the graph of a tensor; else empty."""
        return ""

    def random_state(self) -> Any:
        """The state of the framework's random numbers; None where the program's own objects have it."""

    def set_random_state(self, state: Any) -> None:
        """Continue with this state."""

    def seed(self, number: int) -> None:
        """Begin the framework's random numbers anew."""

    def of_logical_ranks(self) -> tuple[Any, Any] | None:
        """The state of this rank's logical ranks: objects to pickle with its variables, and a part to pickle alone,
        which any rank may get. None without logical ranks."""
        return None

    def restore_logical_ranks(self, objects: Any, own: Any, of_ranks: Sequence[Any], place: tuple[int, int]) -> None:
        """Restore the logical ranks of this rank at ``place`` (its rank, and how many ranks) from `of_logical_ranks`.

        ``objects`` and ``own`` are the two parts of the rank whose variables this one has; ``of_ranks`` is the second
        part of each rank, None where a rank had none.
        """


@dataclass(frozen=True)
class Memory:
    """Memory of an object: equal ``key`` for the same memory; ``read`` returns its bytes, ``about`` restores it."""

    key: Any
    read: Callable[[], memoryview]
    about: Any


@dataclass
class Kept:
    """What `dump` returns: the names that are in ``content``, and why others are left out."""

    content: bytes
    names: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    loses: dict[str, str] = field(default_factory=dict)


_keepers: dict[str, Keeper] = {}


def register_keeper(keeper: Keeper) -> None:
    """Register how the objects of a framework are kept."""
    _keepers[keeper.name] = keeper


def _unkeepable(value: Any) -> str:
    """What ``value`` is, if another process could not have it; else empty."""
    if isinstance(value, io.IOBase):
        if isinstance(value, io.BytesIO | io.StringIO):
            return ""
        return f"an open file ({getattr(value, 'name', type(value).__name__)})"
    for kinds, words in _WORDS:
        if isinstance(value, kinds):
            return words
    return next((words for keeper in _keepers.values() if (words := keeper.unkeepable(value))), "")


_WORDS: tuple[tuple[Any, str], ...] = (
    (threading.Thread, "a thread"),
    ((type(threading.Lock()), type(threading.RLock())), "a lock"),
    ((GeneratorType, AsyncGeneratorType), "a generator"),
    (CoroutineType, "a coroutine"),
    ((subprocess.Popen, BaseProcess), "a process"),
    (socket.socket, "a connection"),
    (Communicator, "a connection between ranks"),
    ((FrameType, TracebackType), "a frame of a call"),
)
_ATOMIC = frozenset({int, float, str, bool, bytes, type(None), list, dict, tuple, set, frozenset, type, complex})


class _CannotKeepError(Exception):
    """An object belongs to this process alone."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes memory instead of writing it, once for all objects that share it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._take_buffer)
        self.memory: list[tuple[str, Memory]] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self._numbers: dict[Any, int] = {}

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes <= _INLINE:
            return True  # in the pickle
        self.buffers.append(buffer)
        return False

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _ATOMIC:
            return None
        if words := _unkeepable(obj):
            raise _CannotKeepError(words)
        for keeper in _keepers.values():
            if (memory := keeper.memory_of(obj)) is not None:
                key = keeper.name, memory.key
                if key not in self._numbers:
                    self._numbers[key] = len(self.memory)
                    self.memory.append((keeper.name, memory))
                return "memory", self._numbers[key]
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Knob) and obj.is_own:
            return _knob, (obj.name, obj.range, obj.value)
        for keeper in _keepers.values():
            if (reduced := keeper.reduced(obj)) is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


def _knob(name: str, range_: Range, value: Value) -> Knob:
    knob = Knob(name, range_, value)
    steering.add(knob)
    return knob


def dump(values: Mapping[str, Any], put: Callable[[memoryview], str]) -> Kept:
    """Pickle variables together, so that they still share objects afterwards; ``put`` stores memory and names it.

    Leaves out variables that cannot be pickled, because of themselves or of an object in them.
    """
    logical = {name: one for name, keeper in _keepers.items() if (one := keeper.of_logical_ranks()) is not None}
    kept = dict(values)
    if logical:
        kept[_OF_LOGICAL] = {name: objects for name, (objects, _) in logical.items()}
    left_out: dict[str, str] = {}
    try:
        pickler, data = _pickled(kept)
    except Exception:  # the object's own code may raise anything
        left_out = {name: why for name, value in kept.items() if (why := _why_not(value))}
        kept = {name: value for name, value in kept.items() if name not in left_out}
        pickler, data = _pickled(kept)
    loses = {name: lost for name, value in kept.items() for one in _keepers.values() if (lost := one.loses(value))}
    states = {name: read() for name, (read, _) in _states().items()}

    def stored(memory: memoryview) -> bytes | str:
        return bytes(memory) if memory.nbytes <= _INLINE else put(memory)

    content = {
        "data": data,
        "memory": [(keeper, one.about, (held := one.read()).nbytes, stored(held)) for keeper, one in pickler.memory],
        "buffers": [(buffer.raw().nbytes, put(buffer.raw())) for buffer in pickler.buffers],
        "states": states,
        "logical": {name: of_rank for name, (_, of_rank) in logical.items()} if _OF_LOGICAL in kept else {},
    }
    return Kept(pickle.dumps(content, protocol=5), [name for name in kept if name != _OF_LOGICAL], left_out, loses)


def _states() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to read and set the states of this process: random numbers, and the position of its curves."""
    return {"curves": (metrics.position, metrics.hold_position), **_generators()}


def random_states() -> bytes:
    """The random numbers of this process: of Python, of numpy where it is imported, and of the frameworks."""
    return pickle.dumps({name: read() for name, (read, _) in _generators().items()}, protocol=5)


def continue_random(states: bytes, new_rank: int | None = None) -> None:
    """Continue with the result of `random_states`; a ``new_rank``, which had none then, gets other numbers."""
    Loaded({}, pickle.loads(states), new_rank).use()


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    states: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "python": (random.getstate, random.setstate),
    }
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = (numpy.random.get_state, numpy.random.set_state)
    for keeper in _keepers.values():
        states[_OF_FRAMEWORK + keeper.name] = (keeper.random_state, keeper.set_random_state)
    return states


def _pickled(values: Mapping[str, Any]) -> tuple[_Pickler, bytes]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(values)
    return pickler, file.getvalue()


def _why_not(value: Any) -> str:
    """Why a value cannot be pickled; empty when it can."""
    kind = type(value).__name__
    try:
        _pickled({"": value})
    except _CannotKeepError as error:
        return str(error) if _unkeepable(value) else f"{kind} with {error} in it"
    except Exception as error:
        return f"{kind}: {' '.join(error_text(error).split())[:_MOST_REASON]}"
    return ""


class _Unpickler(pickle.Unpickler):
    """Loads memory when the first object needs it."""

    def __init__(self, content: Mapping[str, Any], get: Callable[[str, memoryview], None]) -> None:
        self._content, self._get = content, get
        buffers = (self._bytes(size, name) for size, name in content["buffers"])
        super().__init__(io.BytesIO(content["data"]), buffers=buffers)
        self._loaded: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        _, number = pid
        if number not in self._loaded:
            keeper, about, size, where = self._content["memory"][number]
            self._loaded[number] = _keeper(keeper).with_memory(size, partial(self._fill, where), about)
        return self._loaded[number]

    def _fill(self, where: bytes | str, into: memoryview) -> None:
        if isinstance(where, str):
            self._get(where, into)
        else:
            into[:] = where

    def _bytes(self, size: int, where: bytes | str) -> bytearray:
        data = bytearray(size)
        self._fill(where, memoryview(data))
        return data


def _keeper(name: str) -> Keeper:
    if name not in _keepers:
        import_module(framework(name).face)
    return _keepers[name]


def load(
    place: tuple[int, int], ranks: int, read: Callable[[int], bytes], get: Callable[[str, memoryview], None]
) -> Loaded:
    """Load what `dump` kept on ``ranks`` ranks, at ``place`` (this rank, and how many there are now). ``read`` returns
    the content of a rank's file, ``get`` reads memory that ``put`` stored.

    Nothing changes before `Loaded.use`. A rank that did not exist then gets the variables of another one, and random
    numbers of its own. A logical rank gets its own state on any rank. Raises what unpickling raises.
    """
    rank, _ = place
    own: Mapping[str, Any] = pickle.loads(read(rank % ranks))
    for name in own["states"]:
        if name.startswith(_OF_FRAMEWORK):
            _keeper(name.removeprefix(_OF_FRAMEWORK))
    values = _Unpickler(own, get).load()
    logical = []
    if objects := values.pop(_OF_LOGICAL, {}):
        of_ranks = [own if other == rank % ranks else pickle.loads(read(other)) for other in range(ranks)]
        logical = [
            _OfLogicalRanks(name, one, own["logical"][name], [content["logical"].get(name) for content in of_ranks])
            for name, one in objects.items()
        ]
    return Loaded(values, own["states"], rank if rank >= ranks else None, place, logical)


@dataclass
class _OfLogicalRanks:
    """The arguments of `Keeper.restore_logical_ranks`, and the framework's name."""

    name: str
    objects: Any
    own: Any
    of_ranks: list[Any]


@dataclass
class Loaded:
    """Variables, and the states of the process that belong to them."""

    values: dict[str, Any]
    _states: Mapping[str, Any]
    _new_rank: int | None
    _place: tuple[int, int] = (0, 1)
    _logical: Sequence[_OfLogicalRanks] = ()

    def use(self) -> None:
        known = _states()
        for name, state in self._states.items():
            if name in known:
                known[name][1](state)
        if self._new_rank is not None:
            random.seed(f"{random.random()} {self._new_rank}")
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(random.getrandbits(32))
            for keeper in _keepers.values():
                keeper.seed(random.getrandbits(63))
        for one in self._logical:
            _keepers[one.name].restore_logical_ranks(one.objects, one.own, one.of_ranks, self._place)
