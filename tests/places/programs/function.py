"""A function that `ring_notebook.run` starts, in a program that no guard protects from being imported again."""

import sys

import ring_notebook


def rank_of_this_process() -> tuple[int, int]:
    from ring_notebook.api import basics as ring

    ring.init()
    return ring.rank(), ring.local_size()


if __name__ == "__main__":
    sys.stdout.write(f"run {ring_notebook.run(rank_of_this_process, n=2)}\n")
