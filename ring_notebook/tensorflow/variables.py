"""One rank's variables and objects on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from ring_notebook.api import objects
from ring_notebook.api.process_sets import ProcessSet, global_process_set
from ring_notebook.tensorflow.graph_call import is_first_graph
from ring_notebook.tensorflow.tensor_collectives import broadcast_


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Assign ``root_rank``'s values to the variables of all ranks (Horovod: ``broadcast_variables``).

    In a graph of TensorFlow 1 returns the op that does so. ``inplace`` is Horovod's argument and has no effect.
    """
    assigned = broadcast_(list(variables), root_rank, "variables", process_set)
    return tf.group(*assigned) if is_first_graph() else None


def broadcast_global_variables(root_rank: int) -> Any:
    """The op of `broadcast_variables` for all variables of the graph (Horovod: ``broadcast_global_variables``).

    Raises RuntimeError with eager execution, where there is no such collection.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables needs a graph of TensorFlow 1; with eager execution call "
            "broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives all ranks the variables of ``root_rank`` when a session begins (Horovod: the same name).

    ``device`` is Horovod's argument and has no effect.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.process_set = process_set
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the op, once for each graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_variables(tf.compat.v1.global_variables(), self.root_rank, self.process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the ``obj`` of ``root_rank`` on every rank; ``session`` has no effect (Horovod: ``broadcast_object``)."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function of an object that calls `broadcast_object` (Horovod: ``broadcast_object_fn``).

    ``session`` has no effect.
    """
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of ``process_set``; ``session`` has no effect (Horovod: ``allgather_object``)."""
    return objects.gather_objects(obj, name or "allgather_object", process_set)
