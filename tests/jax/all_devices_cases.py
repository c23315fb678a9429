"""What ranks do with programs of JAX's own over the devices of all of them; see harness/case_jobs.py.

True for two ranks and more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax
import ring_notebook.jax as hvd
from ring_notebook.core import world
from ring_notebook.errors import CollectiveAborted, CollectiveMismatch
from ring_notebook.jax import jax_private

hvd.init()
hvd.start_distributed()
SHARD_MAP = getattr(jax, "shard_map", None) or __import__("jax.experimental.shard_map", fromlist=["x"]).shard_map
ROWS, EVERYWHERE = PartitionSpec("ranks"), PartitionSpec()


def mesh(ranks: int = 0) -> Mesh:
    """The devices of the first ``ranks``, or of all."""
    return Mesh(np.array(jax.devices()[: ranks or None]), ("ranks",))


def rows(over: Mesh) -> jax.Array:
    """A row of each rank, which has its number."""
    own = np.full((1, 2), hvd.rank(), np.float32)
    return jax.make_array_from_process_local_data(NamedSharding(over, ROWS), own, (over.size, 2))


def step(rows: jax.Array) -> jax.Array:
    return rows.sum(axis=0)


def other_step(rows: jax.Array) -> jax.Array:
    return rows.max(axis=0)


def on(over: Mesh, function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Compiled, with the same result on all devices."""
    return jax.jit(function, out_shardings=NamedSharding(over, EVERYWHERE))


def mapped(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Compiled, on the rows of each rank."""
    return jax.jit(SHARD_MAP(function, mesh=mesh(), in_specs=ROWS, out_specs=ROWS))


def value(array: jax.Array) -> np.ndarray:
    return np.asarray(array.addressable_data(0))


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def case_sums_are_equal_to_ours() -> None:
    total = on(mesh(), step)
    for _ in range(3):
        beside = jax.jit(partial(hvd.allreduce, op=hvd.Sum))(jnp.full(2, float(hvd.rank())))
        np.testing.assert_allclose(value(total(rows(mesh()))), beside)


def case_cpp_starts_programs_that_have_run_before() -> None:
    """JAX's functions in Python, which would, are not called then."""
    if "const_args" not in jax_private.private("start_data")._fields:
        return
    total, array, called = on(mesh(), step), rows(mesh()), set()
    for _ in range(2):
        value(total(array))
    sys.setprofile(lambda frame, event, _: called.add(frame.f_globals.get("__name__", "")) if event == "call" else None)
    try:
        total(array)
    finally:
        sys.setprofile(None)
    assert "ring_notebook.jax.all_devices" in called, "it has not passed the gate"
    assert "jax._src.pjit" not in called


def case_a_rank_that_starts_another_program_is_named_at_once() -> None:
    """Also in programs that `lower().compile()` made; the next ones match again."""
    for compiled in (False, True):
        programs = [on(mesh(), function) for function in (step, other_step)]
        if compiled:
            programs = [one.lower(rows(mesh())).compile() for one in programs]
        for _ in range(3):
            value(programs[0](rows(mesh())))
            with pytest.raises(CollectiveMismatch) as caught:
                programs[is_last()](rows(mesh()))
            others = "rank 0:" if hvd.size() == 2 else f"ranks 0-{hvd.size() - 2}:"
            assert f"{others} jax.jit(step): all-reduce add f32[2]" in str(caught.value), caught.value
            last = f"rank {hvd.size() - 1}: jax.jit(other_step): all-reduce maximum f32[2]"
            assert last in str(caught.value), caught.value
            assert "barrier" not in str(caught.value)


def case_programs_of_one_name_with_other_collectives() -> None:
    def twice(x: jax.Array) -> jax.Array:
        for _ in range(2 if is_last() else 1):
            x = jnp.sin(jax.lax.psum(x, "ranks"))
        return jax.lax.all_gather(x, "ranks").sum(0)

    with pytest.raises(CollectiveMismatch, match=r"jax\.jit\(twice\): all-reduce add .* and 2 more") as caught:
        mapped(twice)(rows(mesh()))
    assert " and 1 more" in str(caught.value)


def case_each_collective_of_jax_waits_for_all() -> None:
    size = hvd.size()
    around = [(rank, (rank + 1) % size) for rank in range(size)]
    programs = {
        "all-reduce": lambda x: jax.lax.psum(x, "ranks"),
        "collective-permute": lambda x: jax.lax.ppermute(x, "ranks", around),
        "all-gather": lambda x: jax.lax.all_gather(x, "ranks")[None, 0, 0],
        "reduce-scatter": lambda x: jax.lax.psum_scatter(jnp.tile(x, (size, 1)), "ranks", tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(jnp.tile(x, (size, 1)), "ranks", 0, 0, tiled=True)[:1],
        "all-reduce add f32[1,2]": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.psum(y, "ranks") + 0 * x, x),
    }
    for text, program in programs.items():
        run = mapped(program)
        value(run(rows(mesh())))
        with pytest.raises(CollectiveMismatch) as caught:
            (mapped(lambda x: jax.lax.pmin(x, "ranks")) if is_last() else run)(rows(mesh()))
        assert text in str(caught.value), caught.value
        assert "all-reduce minimum f32[1,2]" in str(caught.value), caught.value


def case_barriers_of_jax_wait_for_all() -> None:
    """They are programs."""
    for wait in (
        lambda: multihost_utils.sync_global_devices("epoch"),
        lambda: multihost_utils.process_allgather(np.ones(2, np.float32)),
        lambda: multihost_utils.broadcast_one_to_all(np.ones(2, np.float32)),
    ):
        wait()
        with pytest.raises(CollectiveMismatch, match=r"all-reduce minimum f32\[1,2\]"):
            mapped(lambda x: jax.lax.pmin(x, "ranks"))(rows(mesh())) if is_last() else wait()


def case_one_of_our_collectives_instead() -> None:
    """The first program of a generation is one of the operations of all ranks; later no rank can continue."""
    total = on(mesh(), step)
    for first in (True, False):
        if not first:
            value(total(rows(mesh())))
        instead = jax.jit(lambda x: hvd.allreduce(x, name="x")) if is_last() else total
        with pytest.raises(Exception, match="in the same order" if first else "no rank can continue") as caught:
            value(instead(rows(mesh()) if instead is total else jnp.ones(3)))
        assert "jax.jit(step): all-reduce add f32[2]" in str(caught.value), caught.value
        assert "allreduce average 'x' float32 [3]" in str(caught.value), caught.value
        hvd.shutdown()
        hvd.init()


def case_a_rank_that_fails_or_leaves_ends_the_wait() -> None:
    for end, text in ((lambda: world.fail(ValueError("no such file")), "no such file"), (hvd.shutdown, "has left")):
        total = on(mesh(), step)
        value(total(rows(mesh())))
        if is_last():
            end()
        else:
            with pytest.raises(CollectiveAborted, match=rf"jax\.jit\(step\): all-reduce add f32\[2\](.|\n)*{text}"):
                value(total(rows(mesh())))
        hvd.shutdown()
        hvd.init()


def case_a_program_on_devices_of_some_ranks() -> None:
    """Only these wait for one another; the others are elsewhere."""
    over = mesh(2)
    if hvd.rank() < 2:
        total = on(over, step)
        for _ in range(2):
            assert value(total(rows(over))).tolist() == [1, 1]
        with pytest.raises(CollectiveMismatch, match=r"rank 1: jax\.jit\(other_step\)"):
            on(over, other_step if hvd.rank() == 1 else step)(rows(over))
    hvd.barrier()
    assert value(on(mesh(), step)(rows(mesh()))).tolist() == [sum(range(hvd.size()))] * 2


def case_a_program_without_collectives_waits_for_nobody() -> None:
    array = rows(mesh())
    if is_last():
        assert value(jax.jit(lambda x: 2 * x + 1)(array)).tolist() == [[2 * hvd.rank() + 1] * 2]
        assert value(array * 3).tolist() == [[3 * hvd.rank()] * 2]
    hvd.barrier()
