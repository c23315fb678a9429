"""The frameworks that cells train with: what the kernel and the engines need to know of each, as data.

A framework is an entry of `BUILT_IN`, or of the entry point group ``ring_notebook.frameworks`` of an installed package.
Nothing here imports a framework. A face describes its tensors to `ring_notebook.api.tensor_adapter`.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points

from ring_notebook.config import config
from ring_notebook.errors import RingError

__all__ = ["BUILT_IN", "Advice", "Framework", "Vocabulary", "default", "framework", "frameworks", "named", "names_in"]

_GROUP = "ring_notebook.frameworks"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How cells that use a framework are written: names of calls, by the last part of a dotted name."""

    gradients: frozenset[str] = frozenset()
    """Calls that make gradients."""
    averaging: frozenset[str] = frozenset()
    """Calls that average gradients over the ranks."""
    wrapping: frozenset[str] = frozenset()
    """Calls that wrap an optimizer and leave the first values of the model as they are."""
    preparing: frozenset[str] = frozenset()
    """Calls that move the model to the rank's device."""
    same_start: frozenset[str] = frozenset()
    """Calls that give all ranks the same first values."""
    sharding: frozenset[str] = frozenset()
    """Calls that give each rank its share of the data."""
    sharding_keywords: frozenset[str] = frozenset()
    """Keywords of a loader that do the same."""
    loading: frozenset[str] = frozenset()
    """Calls that make a loader of batches."""
    moving: frozenset[str] = frozenset()
    """Calls that move tensors to another device, or choose one."""
    optimizers: str = ""
    """What the dotted name of an optimizer contains."""
    linear_rate: frozenset[str] = frozenset()
    """Optimizers whose learning rate grows with the batch."""
    rate: str = ""
    """The keyword of an optimizer's learning rate."""
    saving: frozenset[str] = frozenset()
    """Whole dotted names of calls that write a file on every rank."""
    choosing_device: str = ""
    """The end of the dotted name of the call that chooses a device by its number."""
    clipping: frozenset[str] = frozenset()
    """Calls that clip gradients where they lie."""
    synchronizing: frozenset[str] = frozenset()
    """Calls that wait until gradients are averaged, before the step does."""
    strategies: frozenset[str] = frozenset()
    """Calls that average gradients within backward by the framework's own means."""
    own_batch_norm: frozenset[str] = frozenset()
    """Calls that make the framework's own synchronized batch norm."""
    device_prefix: str = ""
    """What the name of a numbered device begins with."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change in a cell that goes wrong, in this framework's words; code stands between backquotes."""

    average: str = ""
    same_start: str = ""
    shard: str = ""
    save: str = ""
    move_batches: str = ""
    move_model: str = ""
    own_device: str = ""
    clip: str = ""
    batch_norm: str = ""


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework."""

    name: str
    face: str
    """The module that ``ring`` is in its cells. An engine imports the default framework's face when it starts."""
    modules: tuple[str, ...]
    """What the names of its modules, and of those that load it, begin with."""
    gpu_word: str = ""
    """A word in the source of every cell that uses a GPU."""
    gpu_setup: str = ""
    """Lines by which a rank of a script chooses its GPU; in an engine the rank's own GPU is the first."""
    before: Mapping[str, str] = field(default_factory=dict)
    """What an engine calls before a cell that names the key, as ``module:function``."""
    watch_waits: str = ""
    """What has `core.waits` count the waits of the framework's own C++ for other ranks, and has those end that look at
    nothing, as ``module:function``; an engine calls it before each cell."""
    end_waits: str = ""
    """What ends a rank's waits in C++ that look at no signal, as ``module:function``; any thread calls it."""
    lost_rank: str = ""
    """Whether an exception is what the framework's C++ raises when another rank has gone, as ``module:function``."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    advice: Advice = field(default_factory=Advice)

    def named_in(self, names: Iterable[str]) -> bool:
        """Whether one of ``names``, as `names_in` gives them, belongs to this framework or its face."""
        return any(f"{name}.".startswith((*self.modules, f"{self.face}.")) for name in names)


# torch's own ways to average gradients, and those of libraries over it, which also start the ranks alike.
_STRATEGIES = frozenset(
    {
        "DistributedDataParallel",
        "DDP",
        "FullyShardedDataParallel",
        "FSDP",
        "fully_shard",
        "Fabric",
        "Accelerator",
        "Trainer",
    }
)
_TORCH = Framework(
    name="torch",
    face="ring_notebook.torch",
    modules=("torch",),
    gpu_word="cuda",
    gpu_setup="""
import torch

if torch.cuda.is_available():
    torch.cuda.set_device(ring.local_rank() % torch.cuda.device_count())
""",
    # It raises where there is a group, and a cell runs again.
    before={
        "init_process_group": "ring_notebook.torch.process_group.run_groups.default_group:end_groups",
        "Accelerator": "ring_notebook.torch.process_group.run_groups.library_state:forget_accelerate",
        "TrainingArguments": "ring_notebook.torch.process_group.run_groups.library_state:forget_accelerate",
    },
    watch_waits="ring_notebook.torch.process_group.run_groups.watched_waits:watch_waits",
    end_waits="ring_notebook.torch.process_group.run_groups.foreign_waits:end_foreign_waits",
    lost_rank="ring_notebook.torch.process_group.run_groups.foreign_waits:tells_of_lost_rank",
    vocabulary=Vocabulary(
        gradients=frozenset({"backward"}),
        averaging=frozenset(
            {"prepare", "DistributedOptimizer", "allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_"}
        )
        | _STRATEGIES,
        wrapping=frozenset({"DistributedOptimizer"}),
        preparing=frozenset({"prepare"}),
        same_start=frozenset({"prepare", "broadcast_parameters", "manual_seed", "load", "load_state_dict"}),
        sharding=frozenset({"prepare", "DistributedSampler", "shard"}),
        sharding_keywords=frozenset({"sampler", "batch_sampler"}),
        loading=frozenset({"DataLoader"}),
        moving=frozenset({"to", "cuda", "to_empty", "set_default_device", "device"}),
        optimizers=".optim.",
        linear_rate=frozenset({"SGD"}),
        rate="lr",
        saving=frozenset({"torch.save"}),
        choosing_device="cuda.set_device",
        clipping=frozenset({"clip_grad_norm_", "clip_grad_value_"}),
        synchronizing=frozenset({"synchronize"}),
        strategies=_STRATEGIES,
        own_batch_norm=frozenset({"torch.nn.SyncBatchNorm", "nn.SyncBatchNorm", "convert_sync_batchnorm"}),
        device_prefix="cuda:",
    ),
    advice=Advice(
        average="After this line add `model, optimizer, loader = ring.prepare(model, optimizer, loader)`",
        same_start="before this line add `ring.broadcast_parameters(model.state_dict(), root_rank=0)`",
        shard=(
            "pass `sampler=torch.utils.data.distributed.DistributedSampler(dataset, ring.size(), ring.rank())`, or use "
            "`ring.prepare`"
        ),
        save="use `ring.save`, which only rank 0 does, atomically",
        move_batches=(
            "`ring.prepare` moves the model to the rank's GPU, and the batches stay on the CPU: move each one in the "
            "loop, as in `x = x.to('cuda')`"
        ),
        move_model=(
            "every rank has a GPU, and the model stays on the CPU: before this line add `model.to('cuda')`, and move "
            "each batch there too"
        ),
        own_device=(
            "every rank sees its own GPU as `cuda:0` and those of others after it: write `cuda`, whatever the rank"
        ),
        clip=(
            "this clips the gradients of each rank before they are averaged in `step()`: call "
            "`optimizer.synchronize()` before it, and `step()` within `with optimizer.skip_synchronize():`"
        ),
        batch_norm=(
            "torch's SyncBatchNorm needs a process group of torch's and its own backward: make it `ring.SyncBatchNorm`"
        ),
    ),
)

BUILT_IN = (_TORCH,)
"""The frameworks whose faces come with this package; the first is the default."""


@lru_cache(maxsize=1)
def frameworks() -> tuple[Framework, ...]:
    """`BUILT_IN`, then those of other packages. An entry point that fails to load is left out with a warning."""
    found = {known.name: known for known in BUILT_IN}
    for entry in entry_points(group=_GROUP):
        try:
            loaded = entry.load()
        except Exception as error:
            warnings.warn(f"entry point {entry.name!r} ({entry.value}) failed to load: {error}", stacklevel=2)
        else:
            found.setdefault(loaded.name, loaded)
    return tuple(found.values())


def framework(name: str) -> Framework:
    """The framework called ``name``. Raises RingError that lists the known ones where there is none."""
    for known in frameworks():
        if known.name == name:
            return known
    raise RingError(
        f"unknown framework {name!r}; known are {', '.join(known.name for known in frameworks())}. Install the "
        "package that brings it, here and on every engine"
    )


def default() -> Framework:
    """The framework of cells that name none: that of RING_FRAMEWORK, else the first of `BUILT_IN`."""
    return framework(config().framework) if config().framework else BUILT_IN[0]


def named(names: Iterable[str]) -> Framework | None:
    """The framework that a cell with these names uses; the default one where it uses several, None where none."""
    given = set(names)
    return next((known for known in (default(), *frameworks()) if known.named_in(given)), None)


def names_in(tree: ast.AST) -> set[str]:
    """Every name that source uses, and every module it imports, as ``os.path``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names
