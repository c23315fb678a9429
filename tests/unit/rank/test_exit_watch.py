"""That a process tells how it ends before its exit handlers run, whichever way it ends, and only if it does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from harness.programs import ran

SETUP = """
import argparse, atexit, builtins, os, sys, threading
from sys import exit as bound
from ring_notebook.rank.exit_watch import watch_exits
from ring_notebook.rank.rank_status import exit_code_of
atexit.register(lambda: os.write(1, b"handlers"))
watch_exits(lambda error: os.write(1, f"{type(error).__name__} {exit_code_of(error)}, ".encode()))
"""


@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        ("sys.exit(3)", 3, "SystemExit 3, "),
        ("sys.exit(-1)", 255, "SystemExit 255, "),
        ("sys.exit('why')", 1, "SystemExit 1, "),
        ("exit(4)", 4, "SystemExit 4, "),
        ("quit(4)", 4, "SystemExit 4, "),
        ("bound(5)", 5, "SystemExit 5, "),
        ("argparse.ArgumentParser().parse_args(['--no-such'])", 2, "SystemExit 2, "),
        ("raise ValueError", 1, "ValueError 1, "),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt 130, "),
        ("sys.exit()", 0, ""),
        ("sys.exit(None)", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("pass", 0, ""),
        ("try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3", 0, ""),
        ("try: sys.exit(3)\nfinally: sys.exit(0)", 0, ""),
        ("one = threading.Thread(target=sys.exit, args=(3,)); one.start(); one.join()", 0, ""),
        ("if os.fork() == 0: atexit._clear(); sys.exit(3)\nos.wait()", 0, ""),
    ],
)
def test_how_it_ends_is_told_first(ends: str, code: int, told: str) -> None:
    done = ran([sys.executable, "-c", SETUP + ends])
    assert (done.returncode, done.stdout) == (code, told + "handlers"), done.stderr
    assert ("Traceback" in done.stderr) == ("raise" in ends)


def test_the_exception_travels_as_what_it_is() -> None:
    code = "import pickle\ntry: sys.exit(3)\nexcept SystemExit as error: again = pickle.loads(pickle.dumps(error))\n"
    code += "assert (type(again), again.code) == (SystemExit, 3)"
    subprocess.run([sys.executable, "-c", SETUP + code], stdout=subprocess.DEVNULL, timeout=100, check=True)
