"""The native calls of a thread that a signal interrupts: written without the interpreter, after what the signal did."""

from __future__ import annotations

import sys

from harness.programs import ran

PROGRAM = """
import ctypes, faulthandler, os, signal, sys, threading, time
from ring_notebook import _core
faulthandler.register(signal.SIGUSR1, 2, all_threads=False)
for _ in range(2):  # once, however often it is asked for
    _core.report_native_stack(signum=signal.SIGUSR1, fd=2)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:  # has no thread that writes; asking it does no harm
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(0)
print("PARENT", file=sys.stderr, flush=True)
libc = ctypes.PyDLL(None)
if os.fork() == 0:
    for _ in range(int(sys.argv[1])):
        time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)
while True:  # holds the interpreter; the signal ends a sleep
    libc.sleep(30)
"""


def test_calls_of_a_thread_that_holds_the_interpreter() -> None:
    ended = ran([sys.executable, "-c", PROGRAM, "20"])
    _, _, text = ended.stderr.partition("PARENT\n")
    python, *blocks = text.split("Native stack (most recent call first):\n")
    assert 'File "<string>"' in python, "what the signal did before comes first"
    assert blocks
    for block in blocks:
        native, end, _ = block.partition("End of native stack\n")
        assert end
        names = [line.split(" of ")[0].strip() for line in native.splitlines()]
        assert any("sleep" in name for name in names)
        assert "_PyEval_EvalFrameDefault" in names
        assert not any("on_signal" in name or "backtrace" in name for name in names)
