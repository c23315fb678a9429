"""Runs the tests of torch.distributed that an installed PyTorch carries, on backend "ring": the program of one rank.

PyTorch starts processes for each test; here the ranks of one job run them all, each test in a default group of its own.
Which tests are for which backend is decided when PyTorch's module is imported. So it is imported twice: as for Gloo,
whose tests are for tensors in CPU memory, and as for MPI, the only backend whose all_to_all is tested on such tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed

import ring_notebook.torch as ring
from ring_notebook.core import world

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from libraries.cpu_devices import on_cpu
from libraries.left_out import reason_to_leave_out

__all__ = ["main"]

SOURCE = "torch.testing._internal.distributed.distributed_test"


CHOOSES_BY_NAME = ("test_accumulate_gradients",)
"""Tests that take tensors in CPU memory when the backend is called gloo or mpi."""


def runs(*_: Any, **__: Any) -> Any:
    """A decorator that leaves no test out."""
    return lambda test: test


def imported(rules: str) -> ModuleType:
    """PyTorch's module with the tests that are for backend ``rules``, which then run on ours."""
    os.environ["BACKEND"] = rules
    common_distributed.skip_if_lt_x_gpu = runs  # GPUs are in CPU memory
    common_distributed.skip_if_no_gpu = runs()
    common_distributed.skip_if_small_worldsize = runs()  # says so below eight ranks; the tests need three
    found = importlib.util.find_spec(SOURCE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.RULES = rules
    os.environ["BACKEND"] = "ring"
    return module


def left_out(test: Any) -> str:
    """Why PyTorch's own decorators leave a test out; empty when they do not."""
    return str(getattr(test, "__unittest_skip_why__", "no reason")) if getattr(test, "__unittest_skip__", False) else ""


def suite(modules: list[ModuleType]) -> dict[str, type]:
    """The class of each test: of the first module that does not leave it out."""
    classes = []
    for module in modules:
        tests = module.DistributedTest._DistTestBase
        classes.append(
            type(
                "Suite",
                (module.TestDistBackend, tests),
                {"MODULE": module, "RULES": module.RULES, "_handle_test_skip": staticmethod(skip)},
            )
        )
    names = sorted(name for name in dir(classes[0]) if name.startswith("test_"))
    return {name: next((c for c in classes if not left_out(getattr(c, name))), classes[0]) for name in names}


def skip(reason: str) -> None:
    raise unittest.SkipTest(reason)


def outcome(kind: type, name: str, codes: dict[int, str]) -> tuple[str, str]:
    """Run one test on this rank: "passed", "skipped" with the reason, or "failed" with the traceback."""
    test: Any = kind(name)
    if reason := reason_to_leave_out(name) or left_out(getattr(kind, name)):
        return "skipped", reason
    test.rank = ring.rank()
    test.file_name = os.environ["TEMP_DIR"] + "/store"
    sys.modules[SOURCE] = kind.MODULE  # where pickle looks for the classes of the tests
    kind.MODULE.BACKEND = kind.RULES if name.startswith(CHOOSES_BY_NAME) else "ring"
    try:
        dist.init_process_group("ring", timeout=timedelta(seconds=20))
        torch.manual_seed(1234)
        with on_cpu(kind.MODULE):
            getattr(test, name)()
            kind.MODULE.Barrier.sync(timeout=30)  # PyTorch's tests end together too: a rank that leaves ends the others
    except unittest.SkipTest as skipped:
        return "skipped", str(skipped)
    except SystemExit as left:
        if left.code in codes:
            return "skipped", codes[int(left.code)]
        return "failed", traceback.format_exc()
    except BaseException as error:
        world.fail(error)  # the other ranks are in the same test
        return "failed", traceback.format_exc()
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return "passed", ""


def main(folder: str, only: list[str]) -> None:
    """Run all tests, or ``only`` these, and write what became of each, why, and its seconds to ``folder/RANK.json``."""
    warnings.simplefilter("ignore")
    ring.init()
    rank = ring.rank()
    os.environ.update(TEMP_DIR=folder, WORLD_SIZE=str(ring.size()), INIT_METHOD=f"file://{folder}/init")
    for name in ("barrier", "test_dir"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    modules = [imported("gloo"), imported("mpi")]
    codes = {one.exit_code: one.message for one in modules[0].TEST_SKIPS.values()}
    report = {}
    for name, kind in suite(modules).items():
        if only and name not in only:
            continue
        began = time.monotonic()
        for module in modules:
            module.Barrier.barrier_id = 0
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # a test that has failed may have left it
        dist.set_debug_level_from_env()
        ring.init()
        ring.barrier()
        what, why = outcome(kind, name, codes)
        ring.shutdown()
        report[name] = [what, why, time.monotonic() - began]
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(report, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
