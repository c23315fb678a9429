"""Where the main thread is, asked by another thread while it goes on."""

from __future__ import annotations

import subprocess
import sys

LOOKS = """
import gc
import threading

from ring_notebook.engine.own_stack import main_frames

deep, leave, left = threading.Event(), threading.Event(), threading.Event()


class LetsGo:
    def __del__(self):
        if threading.current_thread() is not threading.main_thread():
            leave.set()
            left.wait(10)


def look(allocations):
    gc.disable()
    gc.collect()
    deep.wait()
    garbage = LetsGo()
    garbage.itself = garbage
    del garbage
    gc.set_threshold(allocations)
    gc.enable()
    [(frame.f_code.co_name, frame.f_lineno) for frame in main_frames()]
    gc.disable()
    gc.set_threshold(700)
    leave.set()


def descend(depth):
    if depth:
        return descend(depth - 1)
    deep.set()
    leave.wait(10)


def use_the_same_memory(depth):
    return depth and (use_the_same_memory(depth - 1), [depth] * 3)


for allocations in range(1, 60):
    for event in (deep, leave, left):
        event.clear()
    thread = threading.Thread(target=look, args=[allocations])
    thread.start()
    descend(40)
    use_the_same_memory(80)
    left.set()
    thread.join()
print("whole")
"""


def test_the_collector_lets_the_main_thread_leave_its_frames() -> None:
    """Python 3.11 makes frame objects when they are asked for: a collection in between runs code of anybody."""
    done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "whole\n", "")
