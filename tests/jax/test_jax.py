"""JAX on ranks, without PyTorch: `make test-jax`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.case_jobs import cases, check, of_a_job
from harness.programs import ran

if find_spec("jaxlib") is None:
    pytest.skip("lives in an environment of its own: make test-jax", allow_module_level=True)
CASES = Path(__file__).with_name("jax_cases.py")
SEVERAL_DEVICES = Path(__file__).with_name("several_devices_cases.py")
ALL_DEVICES = Path(__file__).with_name("all_devices_cases.py")
LIBRARIES = Path(__file__).with_name("library_cases.py")
PRIVATE_NAMES_PROGRAM = Path(__file__).with_name("private_names_program.py")
RINGRUN = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]


@of_a_job
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", cases(CASES))
def test_on_ranks(case: str, size: int) -> None:
    check(CASES, case, size)


@of_a_job
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", cases(SEVERAL_DEVICES))
def test_on_ranks_of_several_devices(case: str, size: int) -> None:
    check(SEVERAL_DEVICES, case, size)


@of_a_job
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", cases(ALL_DEVICES))
def test_on_devices_of_all_ranks(case: str, size: int) -> None:
    check(ALL_DEVICES, case, size)


@of_a_job
@pytest.mark.skipif(find_spec("flax") is None or find_spec("equinox") is None, reason="they need a newer JAX")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", cases(LIBRARIES))
def test_libraries_on_ranks(case: str, size: int) -> None:
    check(LIBRARIES, case, size)


def private_names() -> list[str]:
    """Without JAX, which the file imports."""
    from ring_notebook.jax.jax_private import PRIVATE_NAMES

    return [*PRIVATE_NAMES]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("absent", [private_names(), *([name] for name in private_names())], ids=",".join)
def test_without_private_names_of_jax(absent: list[str]) -> None:
    done = ran([*RINGRUN, sys.executable, str(PRIVATE_NAMES_PROGRAM), *absent])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all is well") == 2


FALLBACK = """
import warnings
import jax
import jax.numpy as jnp
import ring_notebook.jax as hvd
hvd.init()
from ring_notebook.jax.jax_private import PRIVATE_NAMES
REPLACED
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    result = jax.jit(hvd.allreduce)(jnp.ones(3) * hvd.rank())
    jax.grad(lambda x: hvd.allgather(x).sum())(jnp.ones(2))
try:
    jax.jit(hvd.allreduce)(jnp.ones(3 + hvd.rank())).block_until_ready()
except Exception as error:
    assert "expected float32" in str(error)
else:
    raise AssertionError("ranks with different shapes must fail")
result = jax.jit(lambda x: hvd.allreduce(x) - 1)(result + 1)  # works after a program that has failed
text = [str(one.message) for one in said if "Python's arrays" in str(one.message)]
print(len(text), result.tolist())
"""


@pytest.mark.parametrize(
    ("replaced", "warned"), [("PRIVATE_NAMES['effects'] = 'jax:absent'", 1), ("jax.default_backend = lambda: 'gpu'", 0)]
)
def test_where_xla_cannot_call_the_core_a_callback_does_it(replaced: str, warned: int) -> None:
    command = [*RINGRUN, sys.executable, "-c", FALLBACK.replace("REPLACED", replaced)]
    done = ran(command)
    assert done.stdout == f"{warned} [0.5, 0.5, 0.5]\n" * 2, done.stderr


INTERRUPTED = """
import os, signal, threading
import jax
import jax.numpy as jnp
import ring_notebook.jax as hvd
hvd.init()
long = jax.jit(lambda x: hvd.allreduce(jax.lax.fori_loop(0, 20, lambda _, y: y @ y * 0, x)))
short = jax.jit(hvd.allreduce)
programs = {
    "at once": lambda: short(jnp.ones(3)).block_until_ready(),
    "at once, large": lambda: short(jnp.ones(300000)).block_until_ready(),
    "in a thread of the runtime": lambda: long(jnp.ones((300, 300))).block_until_ready(),
    "step": lambda: hvd.average_gradients({"a": jnp.ones(3)})["a"].block_until_ready(),
}
for _ in range(2):
    programs[PROGRAM]()  # Python carries out the first one
if hvd.rank() == 1:
    threading.Event().wait()  # until rank 0 has ended
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    try:
        programs[PROGRAM]()
    except Exception:  # JAX's
        threading.Event().wait(10)  # Python handles the signal
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(3)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", ["at once", "at once, large", "in a thread of the runtime", "step"])
def test_ctrl_c_in_a_program_that_waits_is_an_interrupt(program: str) -> None:
    script = INTERRUPTED.replace("PROGRAM", repr(program))
    done = ran([*RINGRUN, sys.executable, "-c", script])
    assert "interrupted" in done.stdout, done.stderr


CALLBACK = """
import jax
import jax.numpy as jnp
import ring_notebook.jax as hvd
hvd.init()
def load(x):
    if hvd.rank() == 1:
        raise ValueError("no such image")
    return x
step = jax.jit(lambda x: hvd.allreduce(jax.pure_callback(load, jax.ShapeDtypeStruct(x.shape, x.dtype), x)))
step(jnp.ones(3)).block_until_ready()
"""


@pytest.mark.timeout(200)
def test_an_error_in_a_callback_is_named_everywhere() -> None:
    command = [one for one in RINGRUN if one != "--no-prefix"]
    done = ran([*command, sys.executable, "-c", CALLBACK])
    assert done.returncode != 0
    assert "failed first: exit code 1, ValueError: no such image" in done.stderr
    assert "stopped because rank 1 raised ValueError: no such image" in done.stderr


LOOP = """
import sys
import jax
import jax.numpy as jnp
import ring_notebook.jax as hvd
hvd.init()
turns = {"small": lambda x: x, "in a thread of the runtime": lambda x: jnp.tanh(x @ x)}[PROGRAM]
loop = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, c: turns(hvd.allreduce(c)), x))
loop(jnp.ones((30, 30)), 2).block_until_ready()
print("begins", flush=True)
try:
    loop(jnp.ones((30, 30)), 10**9).block_until_ready()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
except Exception as error:
    print(type(error).__name__, error, flush=True)
    for _ in range(1000):  # Python handles the signal
        pass
    raise
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", ["small", "in a thread of the runtime"])
def test_ctrl_c_in_a_compiled_loop_ends_it_at_the_next_collective(program: str) -> None:
    job = subprocess.Popen(
        [*RINGRUN, sys.executable, "-c", LOOP.replace("PROGRAM", repr(program))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["begins\n"] * 2
        time.sleep(1)
        job.send_signal(signal.SIGINT)
        began = time.monotonic()
        output, errors = job.communicate(timeout=100)
        took = time.monotonic() - began
    finally:
        job.kill()
    assert took < 5, errors  # without it ringrun kills the ranks later
    assert "Interrupt" in output + errors
    assert "SIGKILL" not in errors


DISTRIBUTED = """
import os
import numpy as np
import psutil
import jax
import jax.numpy as jnp
import ring_notebook.jax as hvd
from jax.sharding import Mesh, NamedSharding, PartitionSpec
hvd.init()
hvd.start_distributed()
hvd.start_distributed()  # the cell was run again
assert len(jax.devices()) == hvd.size() and jax.local_device_count() == 1
listening = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"]
assert {one.removeprefix("::ffff:") for one in listening} <= {"127.0.0.1"}, listening
mesh = Mesh(np.array(jax.devices()), ("ranks",))
rows = NamedSharding(mesh, PartitionSpec("ranks"))
own = np.arange(3.0, dtype=np.float32)[None] + hvd.rank()
whole = jax.make_array_from_process_local_data(rows, own)
total = jax.jit(lambda x: x.sum(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))(whole)
for _ in range(2):
    beside = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.asarray(own[0]))
    np.testing.assert_allclose(np.asarray(total.addressable_data(0)), beside)
try:
    hvd.allreduce(whole)
except ValueError as error:
    assert "also on devices of others" in str(error), error
else:
    raise AssertionError("JAX moves such an array")
print("equal", flush=True)
if DIES and hvd.rank() == 1:
    os._exit(7)
if DIES:
    hvd.barrier()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("dies", [False, True])
def test_jax_distributed_beside_our_collectives(dies: bool) -> None:
    command = [*RINGRUN, sys.executable, "-c", DISTRIBUTED.replace("DIES", repr(dies))]
    began = time.monotonic()
    done = ran(command)
    assert done.stdout.count("equal\n") == 2, done.stderr  # Gloo writes too
    assert (done.returncode != 0) == dies, done.stderr
    if dies:
        assert "rank 1 on" in done.stderr
        assert "exit code 7" in done.stderr
        assert time.monotonic() - began < 100


MESH = """
import numpy as np
import jax
import ring_notebook.jax as hvd
from jax.sharding import Mesh, NamedSharding, PartitionSpec
hvd.init()
hvd.start_distributed()
mesh = Mesh(np.array(jax.devices()), ("ranks",))
rows = jax.make_array_from_process_local_data(
    NamedSharding(mesh, PartitionSpec("ranks")), np.ones((1, 3), np.float32)
)
step = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
"""
STARTS = """
for _ in range(2):
    jax.block_until_ready(step(rows))
if ENDS == "waits in a branch":
    shard_map = getattr(jax, "shard_map", None) or __import__("jax.experimental.shard_map", fromlist=["x"]).shard_map
    unchecked = {"check_vma" if hasattr(jax, "shard_map") else "check_rep": False}
    def branch(x):
        return jax.lax.cond(jax.lax.axis_index("ranks") == 1, lambda x: jax.lax.psum(x, "ranks"), lambda x: x, x)
    spec = PartitionSpec("ranks")
    jax.block_until_ready(jax.jit(shard_map(branch, mesh=mesh, in_specs=spec, out_specs=spec, **unchecked))(rows))
if hvd.rank() == 0:
    jax.block_until_ready(step(rows))
elif ENDS == "raises":
    raise ValueError("no such file")
elif ENDS == "is interrupted":
    __import__("threading").Event().wait()
"""
STANDS_IN = "jax.jit(<lambda>): all-reduce add f32[3]"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ends", ["leaves", "raises", "is interrupted", "waits in a branch"])
def test_a_wait_in_jax_for_a_rank_that_does_not_come_has_a_name_and_an_end(ends: str) -> None:
    """Also for one that is in a collective of an earlier program, which the others have left by another branch."""
    job = subprocess.Popen(
        [*RINGRUN, sys.executable, "-c", (MESH + STARTS).replace("ENDS", repr(ends))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RING_STALL_WARNING": "0.5"},
    )
    try:
        assert job.stderr is not None
        told = ""
        if ends in ("is interrupted", "waits in a branch"):
            while "rank 1 has not called it" not in told:  # rank 1 too may wait, for a rank 0 that is late
                told += job.stderr.readline()
                assert job.poll() is None, told
            assert STANDS_IN in told
            job.send_signal(signal.SIGINT)
        told += job.communicate(timeout=100)[1]
    finally:
        job.kill()
    assert job.returncode != 0
    reason = {"leaves": "rank 1 has left", "raises": "rank 1 raised ValueError: no such file"}
    assert STANDS_IN in told
    assert reason.get(ends, "KeyboardInterrupt") in told
    assert ("killing the ranks" in told) == (ends == "waits in a branch")  # XLA looks at no signal


IN_CELLS = """
import time
from ring_notebook import Cluster
from ring_notebook.notebook.panel.waits import stall_sentence
other = "jax.block_until_ready((step if hvd.rank() == 0 else jax.jit(lambda x: x * x.max()))(rows))"
source = "jax.block_until_ready(step(rows)) if hvd.rank() == 0 else __import__('time').sleep(1000)"
def ended(run):
    try:
        return run.wait().error
    except BaseException as error:
        return error
with Cluster(n=2) as cluster:
    print("set up:", ended(cluster.run(SETUP)))
    print("other:", ended(cluster.run(other)))
    run = cluster.run(source)
    while "waits for" not in (told := stall_sentence(run.view.ranks, run.log.code_at)) and not run.done:
        time.sleep(0.1)
    print("sleeps:", told)
    run.interrupt()
    ended(run)
    print("interrupted:", run.status)
    print("again:", ended(cluster.run("jax.block_until_ready(step(rows))")))
"""


@pytest.mark.timeout(300)
def test_a_wait_in_jax_in_a_cell_has_a_name_and_an_end() -> None:
    done = ran([sys.executable, "-c", IN_CELLS.replace("SETUP", repr(MESH))])
    assert done.returncode == 0, done.stderr
    assert "set up: None\n" in done.stdout
    assert f"\n  rank 0: {STANDS_IN}\n  rank 1: jax.jit(<lambda>): all-reduce maximum f32[]\n" in done.stdout
    assert f"rank 0 waits for rank 1 in {STANDS_IN}; rank 1 is at line 1: jax.block" in done.stdout
    assert "interrupted: interrupted\nagain: None\n" in done.stdout
