"""Checkpoints of a training with JAX: of pytrees, which a step replaces by new ones."""

from __future__ import annotations

import os
from typing import Any

import jax
from ring_notebook.api.basics import rank
from ring_notebook.api.checkpoints import Checkpoint
from ring_notebook.api.preparation import of_another
from ring_notebook.errors import RingError
from ring_notebook.jax.averaging import is_optimizer, is_value
from ring_notebook.jax.kept_arrays import reduced_array
from ring_notebook.jax.prepared_trees import has_values


def checkpoint(
    *trees: Any,
    every: str = "epoch",
    keep: int = 3,
    best: str = "",
    largest: bool = False,
    folder: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
) -> Any:
    """Write checkpoints of a training, and continue from the last one; all ranks call this, after `prepare`.

        saved = ring.checkpoint(parameters, state, every="5 min", keep=3, best="val_loss")
        parameters, state = saved.trees
        for epoch in saved.epochs(10):
            for batch in range(saved.batch, batches):
                parameters, state = train_step(parameters, state, x[batch], y[batch])
                saved.step(parameters, state)
            ring.log(val_loss=validate(parameters))

    Takes pytrees of arrays and numbers: parameters, the state of an optax optimizer, keys of random numbers. All ranks
    have the same. Rank 0 writes their leaves to one file, whole or not at all, with a checksum. It resumes on any
    number of ranks. Beyond Horovod. Models of Keras go to the `checkpoint` of that face.

    ``trees`` of the result is a tuple of the trees, those of the checkpoint after a resume; `step` takes the new ones
    after each batch; ``batch`` counts those of the epoch.

    every: "5 min", "2 h", "100 steps", "epoch" or "5 epochs"; there is also one at the end of `Checkpoint.epochs`.
    keep: how many of the newest stay on disk.
    best: a metric that `log` records on rank 0: when it is smaller than ever (``largest``: larger), the checkpoint then
        stays beside them.
    folder: by default that of the run, in a script ``checkpoints``. It is made readable by this user only.
    resume: True continues from the newest checkpoint, "best" from the best, a path from that one; the default as
        ``%%ringtrain --resume`` says. With True a script whose folder has none begins anew.

    Raises TypeError and ValueError for wrong arguments, and RingError for a checkpoint that does not fit.
    """
    if another := of_another("checkpoint", trees, "jax"):
        return another(*trees, every=every, keep=keep, best=best, largest=largest, folder=folder, resume=resume)
    for number, tree in enumerate(trees, 1):
        if is_optimizer(tree):
            raise TypeError(
                f"checkpoint takes pytrees of arrays; argument {number} is an optimizer, whose state is what "
                "optimizer.init(parameters) returns"
            )
        if not has_values(tree):
            raise TypeError(f"checkpoint takes pytrees of arrays; argument {number} is of class {type(tree).__name__}")
    saved = JaxCheckpoint(trees, every, keep, best, largest, folder)
    saved.resume_as(resume)
    return saved


class JaxCheckpoint(Checkpoint):
    """The checkpoints of one training with JAX, see `checkpoint`."""

    @property
    def trees(self) -> tuple[Any, ...]:
        """The newest trees, in the order in which `checkpoint` was given them."""
        return self._objects

    def step(self, *trees: Any) -> None:
        """Count a batch that every rank has used, after which the ``trees`` are these. All ranks call it.

        Writes a checkpoint where one is due. Raises TypeError for another number of trees.
        """
        if len(trees) != len(self._objects):
            raise TypeError(
                f"step takes the {len(self._objects)} trees of checkpoint(), in their order; got {len(trees)}"
            )
        self._objects = trees
        super().step()

    def state_of(self, one: Any) -> list[Any]:
        """The leaves of ``one``, as snapshots keep them; None for a leaf without a value, such as a function."""
        leaves = [leaf if is_value(leaf) else None for leaf in jax.tree_util.tree_leaves(one)]
        return [reduced_array(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

    def restored(self, one: Any, state: list[Any]) -> Any:
        """A tree like ``one`` with the leaves of ``state``."""
        leaves, structure = jax.tree_util.tree_flatten(one)
        if len(leaves) != len(state):
            raise RingError(
                f"rank {rank()}: the checkpoint has {len(state)} arrays of a tree that has {len(leaves)} now; make the "
                "parameters and the optimizer as when it was written"
            )
        return jax.tree_util.tree_unflatten(structure, [_like(*pair) for pair in zip(leaves, state, strict=True)])


def _like(leaf: Any, kept: Any) -> Any:
    """The array that was kept in place of ``leaf``; RingError where it has another shape or dtype."""
    if not is_value(leaf):
        return leaf
    value = kept
    if isinstance(kept, tuple):
        make, arguments = kept
        value = make(*arguments)
    now, then = (_described(one) for one in (leaf, value))
    if now != then and hasattr(leaf, "dtype") and hasattr(value, "dtype"):
        raise RingError(
            f"rank {rank()}: the checkpoint has {then} where the tree has {now}; make the parameters and the "
            "optimizer as when it was written"
        )
    return value


def _described(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)} {list(getattr(leaf, 'shape', ()))}"
