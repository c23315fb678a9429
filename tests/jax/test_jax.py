"""JAX on ranks, without PyTorch: `make test-jax`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.case_jobs import cases, check

if find_spec("jaxlib") is None:
    pytest.skip("lives in an environment of its own: make test-jax", allow_module_level=True)
CASES = Path(__file__).with_name("jax_cases.py")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", cases(CASES))
def test_on_ranks(case: str, size: int) -> None:
    check(CASES, case, size)


FALLBACK = """
import warnings
import jax
import jax.numpy as jnp
import ring_notebook.jax as hvd
from ring_notebook.jax import ordered_call
hvd.init()
def gone():
    raise AttributeError("no effects")
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
    ("replaced", "warned"), [("ordered_call._primitive = gone", 1), ("jax.default_backend = lambda: 'gpu'", 0)]
)
def test_where_xla_cannot_call_the_core_a_callback_does_it(replaced: str, warned: int) -> None:
    command = [
        sys.executable,
        "-m",
        "ring_notebook.launch.cli",
        "--no-prefix",
        "-np",
        "2",
        sys.executable,
        "-c",
        FALLBACK.replace("REPLACED", replaced),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
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
    command = [sys.executable, "-m", "ring_notebook.launch.cli", "--no-prefix", "-np", "2"]
    script = INTERRUPTED.replace("PROGRAM", repr(program))
    done = subprocess.run([*command, sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert "interrupted" in done.stdout, done.stderr
