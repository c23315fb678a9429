"""Leaving out what keeps operations on devices right makes tests fail.

A mutant is one source file of the core in which one passage is replaced, linked with the others; the tests run with it
in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

from harness.programs import ran
from ring_notebook import _core

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "native"
TESTS = Path(__file__).parent
RUN = """
import importlib.util, sys, pytest
spec = importlib.util.spec_from_file_location("ring_notebook._core", sys.argv[1])
sys.modules["ring_notebook._core"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import ring_notebook
ring_notebook._core = module
if sys.argv[2] == "keep nothing":
    from ring_notebook.core.work import HeldWorks
    HeldWorks.hold = lambda self, work: None
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[3:]]))
"""

# what is left out, in which file, the passage, what takes its place, which tests see it
MUTANTS = {
    "the wait for the tensors": (
        "collectives/device/launch.cpp",
        "for (const auto& ready : on_device_.ready) ready->hold_back(stream_.handle());",
        "",
        "test_device_results.py::test_the_callers_stream_waits_and_the_caller_does_not",
    ),
    "the wait of the caller's stream": (
        "communicator/work.cpp",
        "if (launched() && device && device->done) device->done->hold_back(stream);",
        "(void)stream;",
        "test_device_results.py::test_a_group_of_tensors_and_names",
    ),
    "the gate": (
        "communicator/operation.cpp",
        "    if (!work.machine.polling) {\n        if (!group_->released",
        "    if (!work.machine.polling && !work.device) {\n        if (!group_->released",
        "test_device_contracts.py::test_mismatches_are_raised_on_every_rank_and_the_group_lives_on",
    ),
    "the ticket": (
        "collectives/device/launch.cpp",
        "!stream_.order().is_next(group_) || ",
        "",
        "test_device_order.py::test_last_calls_that_cross",
    ),
    "the wait for tensors that the host copies": (
        "communicator/device/device_side.cpp",
        "if (!ready->passed()) return false;",
        "(void)ready;",
        "test_device_fallback.py::test_host_memory_where_one_rank_asks_for_it",
    ),
    "the memory under a kernel that nothing ends": (
        "communicator/device/device_side.cpp",
        "work->must_keep = must_keep;",
        "(void)must_keep;",
        "test_device_contracts.py::test_a_kernel_that_no_abort_ends",
    ),
    "copies that hold up nobody": (
        "communicator/device/device_side.cpp",
        "if (!ready->passed()) return false;",
        "ready->hold_back(stream().copies());",
        "test_device_aborts.py::test_a_copy_to_host_memory_behind_a_kernel_that_never_ends",
    ),
    "the end of named operations that fail in their launch": (
        "communicator/named_lane.cpp",
        "if (under_way_.front().work->launched()) {",
        "if (served == Served::Done) {",
        "test_device_aborts.py::test_a_named_operation_that_is_being_launched",
    ),
    "calls beside a graph that another thread captures": (
        "device/device_context.cpp",
        "constexpr int kRelaxed = 2; ",
        "constexpr int kRelaxed = 0; ",
        "test_device_rules.py::test_a_graph_may_be_captured_while_operations_are_under_way",
    ),
    "the end of kernels that an abort leaves behind": (
        "collectives/device/device_stream.cpp",
        "reaper_->over() && is_idle()",
        "reaper_->over()",
        "test_device_rules.py::test_kernels_that_end_behind_their_abort",
    ),
    "the end of copies that outlive their call": (
        "communicator/device/device_side.cpp",
        "device.issued = !device.copied->passed();",
        "device.issued = false;",
        "test_device_rules.py::test_copies_to_host_memory_that_outlive_their_call",
    ),
    "the wait for NCCL's launch": (
        "collectives/device/nccl_launch.cpp",
        "if (!nccl_.ready()) return false;",
        "",
        "test_device_results.py",
    ),
}


def run(core: Path, mutation: str, *tests: str) -> subprocess.CompletedProcess[str]:
    files, names = zip(*(test.partition("::")[::2] for test in tests), strict=True)
    choice = ["-m", "slow or not slow", "-k", " or ".join(name or "threads" for name in names)]
    paths = [str(TESTS / file) for file in dict.fromkeys(files)]
    return ran([sys.executable, "-c", RUN, str(core), mutation, *choice, *paths], cwd=ROOT, timeout=300)


def compiled(build: Path) -> list[str]:
    """The compiled files of the core, which are not in batches here: one of them can be another."""
    tools = Path(sys.executable).parent
    settings = {
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": "-O1",
        "CMAKE_UNITY_BUILD": "OFF",
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    named = [f"-D{name}={value}" for name, value in settings.items()]
    subprocess.run([tools / "cmake", "-S", NATIVE, "-B", build, "-G", "Ninja", *named], check=True)
    subprocess.run([tools / "cmake", "--build", build, "--target", "_core"], check=True)
    bindings = (build / "CMakeFiles" / "_core.dir").rglob("*.o")
    return [*map(str, sorted(bindings)), str(build / "libring.a")]


def mutant(folder: Path, objects: list[str], source: str, passage: str, replacement: str) -> Path:
    """The core with another ``source``, linked as one in which nothing has changed."""
    folder.mkdir()
    text = (NATIVE / "src" / source).read_text()
    assert text.count(passage) == 1, f"{source} has changed: the mutation must name one passage of it"
    changed = folder / Path(source).name
    changed.write_text(text.replace(passage, replacement))
    core = folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{NATIVE / folder}" for folder in ("include", "src")]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", *includes]
    subprocess.run(["c++", *flags, str(changed), *objects, "-o", str(core), "-lpthread", "-ldl"], check=True)
    return core


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_tests_notice_what_is_left_out(tmp_path: Path) -> None:
    """One test, because the core is compiled once for all of them."""
    objects = compiled(tmp_path / "core")
    source, passage, _, _ = MUTANTS["the gate"]
    unchanged = mutant(tmp_path / "as it is", objects, source, passage, passage)
    whole_file = MUTANTS["the wait for NCCL's launch"][3]
    for tests in [test for *_, test in MUTANTS.values() if test != whole_file], [whole_file]:
        before = run(unchanged, "", *tests)
        assert before.returncode == 0, before.stdout
    for number, (name, (source, passage, replacement, tests)) in enumerate(MUTANTS.items()):
        changed = run(mutant(tmp_path / str(number), objects, source, passage, replacement), "", tests)
        noticed = changed.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
        assert noticed, f"no test notices that {name} is missing: {changed.stdout}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tests_notice_when_tensors_are_not_kept() -> None:
    tests = "test_device_contracts.py::test_tensors_live_until_their_kernel_has_ended"
    core = Path(_core.__file__)
    assert run(core, "", tests).returncode == 0
    assert run(core, "keep nothing", tests).returncode != 0
