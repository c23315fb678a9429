"""What the doctor checks on one host: well on a machine that passes these tests, and exact about what is amiss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.programs import mpiexec_of
from native.fakes.device import environment
from ring_notebook import config as settings
from ring_notebook.launch import doctor_checks, gpu_check
from ring_notebook.launch.doctor import render
from ring_notebook.launch.doctor_checks import Check, diagnose
from ring_notebook.launch.gpu_check import Finding, check_gpus


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    settings.config.cache_clear()
    yield
    settings.config.cache_clear()


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_what_is_amiss_does_not_hide_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_MPIEXEC", "/no/such/mpiexec")
    monkeypatch.setattr(doctor_checks, "_LOOKS", (doctor_checks._python, doctor_checks._mpi))
    checks = by_name(diagnose())
    assert checks["mpi"].status == "fail"
    assert "/no/such/mpiexec does not run" in checks["mpi"].found
    assert checks["python"].status == checks["cores"].status == "ok"


def test_ranks_that_do_not_meet_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever MPI prints besides, as it does with I_MPI_DEBUG."""
    # An mpiexec of the right name that starts ranks which know nothing of one another.
    alone = mpiexec_of('echo "[0] MPI startup(): 2 ranks;"; shift 2; "$@"; "$@"', tmp_path)
    monkeypatch.setenv("RING_MPIEXEC", str(alone))
    check = doctor_checks._mpi()
    assert check.status == "fail"
    assert "starts ranks that found sizes 1 1, expected 2 2" in check.found
    assert "RING_MPIEXEC" in check.advice


def test_settings_that_are_not_at_their_defaults_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_ALGORITHM", "ring")
    assert "algorithm=ring" in doctor_checks._settings().found


def test_the_table_puts_what_to_do_under_what_was_found() -> None:
    table = render([Check("core", "ok", "compiled"), Check("memory", "warn", "0.5 GiB", "buy more")])
    assert table.splitlines() == ["ok    core    compiled", "warn  memory  0.5 GiB", "              -> buy more"]


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Ranks use the fake driver and the fake NCCL."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "refuses", "words"),
    [
        (False, "0", "two ranks connected"),
        (True, "0", "two ranks connected"),
        (True, "1", "reduce through CPU memory (rank "),
    ],
)
def test_two_ranks_try_their_gpus(fake_gpus: pytest.MonkeyPatch, shared: bool, refuses: str, words: str) -> None:
    """Each one, or both the only one."""
    if shared:
        fake_gpus.setattr(gpu_check, "gpus", lambda: ["0"])
        fake_gpus.setenv("FAKE_CUDA_same_uuid", "1")
        fake_gpus.setenv("FAKE_NCCL_init_fails", refuses)
    status, found, advice = check_gpus()
    assert (status, advice) == ("ok", ""), found
    assert words in found
    assert shared or "NCCL 2." in found
    assert re.search(r"\d\d results equal to the host's, bit by bit", found), found
    assert "a rank that died was noticed in" in found


@pytest.mark.parametrize(
    ("name", "value", "words", "to_do"),
    [
        ("RING_CUDA_LIBRARY", "/nowhere/libcuda.so.1", "libcuda.so.1 cannot be loaded", "install NVIDIA's driver"),
        (
            "RING_NCCL_LIBRARY",
            "/nowhere/libnccl.so.2",
            "libnccl.so.2 cannot be loaded",
            "install a CUDA build of torch",
        ),
        ("FAKE_CUDA_no_init", "100", "cuInit: .*CUDA error 100", "--gpus all"),
        ("FAKE_CUDA_no_init", "803", "cuInit: .*CUDA error 803", "restart the machine"),
        ("FAKE_NCCL_version", "22506", "NCCL 2.25.6 is too old; 2.26.0 or newer", "pip install -U torch"),
        ("FAKE_CUDA_same_uuid", "1", "share device 0", "start no more ranks than there are GPUs"),
        ("NCCL_COMM_BLOCKING", "1", "NCCL_COMM_BLOCKING=1", "unset NCCL_COMM_BLOCKING"),
        ("FAKE_NCCL_wrong", "1", "wrong", "CPU memory"),
    ],
)
def test_what_to_do_about_it(name: str, value: str, words: str, to_do: str, fake_gpus: pytest.MonkeyPatch) -> None:
    fake_gpus.setenv(name, value)
    settings.config.cache_clear()
    status, found, advice = check_gpus()
    assert status == "warn", found
    assert re.search(words, found)
    assert to_do in advice
    assert "through CPU memory" in advice


def test_ranks_that_do_not_answer_are_ended(fake_gpus: pytest.MonkeyPatch) -> None:
    fake_gpus.setattr(gpu_check, "LIMIT", 0.01)
    assert check_gpus()[:2] == ("fail", "libraries: no answer within 0.01 s")


def test_where_there_is_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "gpus", list)
    assert check_gpus() == ("ok", "none found", "")
    monkeypatch.setattr(gpu_check, "gpus", lambda: ["0"])
    assert check_gpus()[0] == "warn"
    monkeypatch.setenv("RING_DEVICE", "host")
    settings.config.cache_clear()
    assert "as RING_DEVICE=host says" in check_gpus()[1]


LIBRARIES = '{"step": "libraries", "fine": true, "found": "NCCL 2.27"}\n'
NCCL = "NCCL version 2.27.7+cuda12.9\na:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n"
WARN = "a:1:2 [0] misc/socket.cc:51 NCCL WARN no route"
WORDS = f"{WARN}\na:1:2 [0] NCCL INFO init.cc:5 -> 2\n"
WRONG = '{"step": "results", "fine": false, "found": "sum of float32 differs"}\n'


@pytest.mark.parametrize(
    ("printed", "errors", "in_time", "status", "found"),
    [
        (LIBRARIES, "Traceback\nOSError: no\n", True, "fail", "NCCL 2.27; connect: OSError: no"),
        (LIBRARIES, "", False, "fail", "NCCL 2.27; connect: no answer within 30 s"),
        (LIBRARIES + WRONG, "", True, "fail", "NCCL 2.27; sum of float32 differs"),
        (WRONG.replace("results", "libraries"), "", True, "warn", "sum of float32 differs"),
        (NCCL + LIBRARIES + "a:1:2 [0] " + WRONG + NCCL, "", True, "fail", "NCCL 2.27; sum of float32 differs"),
        (LIBRARIES + NCCL + WORDS, "", True, "fail", f"NCCL 2.27; connect: the ranks ended; {WARN}"),
        (LIBRARIES + NCCL, "OSError: no", True, "fail", "NCCL 2.27; connect: OSError: no"),
        ("3\n[]\n{}\nnull\n" + LIBRARIES + WRONG, "", True, "fail", "NCCL 2.27; sum of float32 differs"),
    ],
)
def test_what_became_of_the_check(printed: str, errors: str, in_time: bool, status: str, found: str) -> None:
    finding: Finding = gpu_check._judge(printed, errors, in_time)
    assert finding[:2] == (status, found)
    assert finding[2]


@pytest.mark.slow
def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `pip install` leaves the torch that is there alone, however old it is."""
    monkeypatch.setattr(doctor_checks.importlib.metadata, "requires", lambda _name: ["torch>=99.1; extra == 'torch'"])
    check = doctor_checks._torch()
    assert check.status == "fail"
    assert check.found.endswith("but Ring Notebook needs torch>=99.1")
    assert check.advice == "`pip install -U torch`"
