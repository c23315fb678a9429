"""What the doctor says of broken set-ups, one cause and one cure on a line, and of several hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.programs import executable, ran
from ring_notebook.analysis.job_failure import RankFailure
from ring_notebook.launch import doctor, doctor_checks
from ring_notebook.launch.doctor import Visit, compare, render
from ring_notebook.launch.doctor_checks import Check, against_limit

TESTS = Path(__file__).parents[2]
REFUSING = [sys.executable, str(TESTS / "places" / "refusing.py"), "1"]
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "sh"]
_FILL = 'mount -t tmpfs -o size=40m none /dev/shm && head -c 30M /dev/zero > /dev/shm/x && exec "$@"'
FULL_SHM = [*SMALL_SHM[:-2], _FILL, "sh"]
_READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && exec "$@"'
READ_ONLY_SHM = ["unshare", "--mount", "sh", "-c", _READ_ONLY, "/dev/shm"]
NO_PROC = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
MPI, DISK = "doctor_checks._mpi()", "doctor._disk('.', '', '')"
NEEDS = "needs 30 MiB of /dev/shm for 2 ranks, and"
NO_CORE = "import sys; sys.modules['ring_notebook._core'] = None"


def elsewhere(what: str, *wrap: str, folder: Path, **env: str) -> list[Check]:
    """What ``what``, an expression over the doctor's modules, finds in a process that is started by ``wrap``."""
    if "unshare" in wrap and os.geteuid() != 0:
        pytest.skip("NOT TESTED with another /dev/shm: needs root")
    code = (
        "import json, sys\nfrom dataclasses import asdict\n"
        "from ring_notebook.launch import doctor, gpu_check, doctor_checks\n"
        f"found = {what}\nprint(json.dumps([asdict(one) for one in (found if isinstance(found, list) else [found])]))"
    )
    done = ran([*wrap, sys.executable, "-c", code], cwd=folder, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return [Check(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def refused(*names: str) -> list[str]:
    return [*REFUSING, ",".join(names)]


def without_core(folder: Path) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(NO_CORE)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(
    ("what", "wrap", "env", "status", "found", "cure"),
    [
        (MPI, SMALL_SHM, {}, "warn", f"{NEEDS} 0.0625 MiB are free", "need it; `docker run --shm-size=1g`"),
        (MPI, FULL_SHM, {}, "warn", f"{NEEDS} 10 MiB are free", "need it; free space there"),
        (MPI, READ_ONLY_SHM, {}, "warn", "MPI needs /dev/shm, which cannot be written here", "need it; mount a tmpfs"),
        (MPI, refused("sched_getaffinity"), {}, "warn", "MPI needs sched_getaffinity", "run these elsewhere"),
        ("doctor_checks._files()", refused("prlimit64"), {}, "ok", "any number of open files", ""),
        (
            "doctor_checks.diagnose()",
            NO_PROC,
            {},
            "fail",
            "no /proc is mounted: ranks of a host",
            "no rank starts without",
        ),
        (DISK, refused("mknodat"), {}, "warn", "takes no named pipes (Operation not permitted)", "a local disk"),
        ("doctor.diagnose_hosts()", refused("clone3"), {}, "fail", "refuses clone3 with EPERM", "Docker 20.10.10"),
        (
            "doctor_checks.Check('gpus', *gpu_check.check_gpus())",
            [],
            {"CUDA_VISIBLE_DEVICES": "0"},
            "warn",
            "none: CUDA_VISIBLE_DEVICES=0 names some, and no driver is here",
            "unset CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_a_broken_set_up(
    what: str, wrap: list[str], env: dict[str, str], status: str, found: str, cure: str, tmp_path: Path
) -> None:
    (check,) = elsewhere(what, *wrap, folder=tmp_path, **env)
    assert check.status == status, check
    assert found in check.found
    assert cure in check.advice
    assert "{" not in check.found + check.advice


def test_the_doctor_works_in_a_folder_on_a_read_only_disk(tmp_path: Path) -> None:
    visits = "setattr(doctor, '_visit', lambda name, *_: doctor.Visit(name)) or doctor.diagnose_hosts()"
    wrap = ["unshare", "--mount", "sh", "-c", _READ_ONLY, str(tmp_path)]
    assert elsewhere(visits, *wrap, folder=tmp_path) == []


SUBSTITUTES = {
    "pidfd_open": "pidfd_open is refused (Operation not permitted): a thread looks at processes",
    "memfd_create": "memfd_create is refused (Operation not permitted): ranks share files without names in /",
    "eventfd2": "eventfd is refused (Operation not permitted): pipes",
    "prctl": "prctl is refused (Operation not permitted): processes look",
    "flock": "flock is refused (Operation not permitted): two programs",
}


def test_each_call_that_is_refused_has_a_line_with_its_substitute(tmp_path: Path) -> None:
    checks = elsewhere("doctor_checks.check_system()", *refused(*SUBSTITUTES), folder=tmp_path)
    assert {(check.name, check.status) for check in checks} == {("system", "ok")}
    assert len(checks) == len(SUBSTITUTES)
    for words in SUBSTITUTES.values():
        assert [check for check in checks if check.found.startswith(words)], checks


@pytest.mark.parametrize(("compiler", "cure"), [(True, "compile it"), (False, "install a C++17 compiler")])
def test_a_core_that_is_not_compiled_is_the_only_line_about_it(compiler: bool, cure: str, tmp_path: Path) -> None:
    """Whatever needs the core is not tried: it would say the same again."""
    if compiler:
        executable(tmp_path / "c++", "#!/bin/sh\n")
    looks = "setattr(doctor_checks, '_LOOKS', (doctor_checks._core, doctor_checks._memory)) or doctor_checks.diagnose()"
    checks = elsewhere(looks, folder=tmp_path, PATH=str(tmp_path), **without_core(tmp_path))
    failed = [check for check in checks if check.status != "ok"]
    assert [check.name for check in failed] == ["core"]
    assert cure in failed[0].advice


def test_a_rank_that_dies_is_told_in_words() -> None:
    report = json.dumps(asdict(RankFailure(0, "vm", -signal.SIGBUS, 1.5)))
    done = subprocess.CompletedProcess([], 1, "", f"[0] said\n\x1e{report}\x1e\n")
    assert doctor_checks._last_line(done) == "rank 0 on vm failed first: killed by SIGBUS"


HERE = {"ring_notebook": "1.0", "Python": "3.11.7", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({**HERE, "torch": "2.12.0"}, ["python", "versions", "clocks"]),
        ({**HERE, "Python": "3.12.1"}, ["torch", "versions", "clocks"]),
        (HERE, ["python", "torch", "clocks"]),
    ],
)
def test_another_version_on_one_host_is_one_line(other: dict[str, str], names: list[str]) -> None:
    """And not two lines that say ok."""
    checks = [Check(name, "ok", "some version", host=host) for host in "ab" for name in ("python", "torch")]
    found = doctor._once(checks, compare([Visit("a", versions=HERE), Visit("b", versions=other)]))
    assert list(dict.fromkeys(check.name for check in found)) == names


@pytest.mark.parametrize(
    ("measured", "cure"),
    [
        ("rank 1 cannot connect to rank 0 on b: timed out", "a firewall?"),
        ("no result within 65 s", "a firewall?"),
        ("rank 1 on b failed first: exit code 1, ImportError: no numpy", "repair what this says first"),
    ],
)
def test_a_firewall_is_blamed_for_connections_only(measured: str, cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_allreduce", lambda _: measured)
    check = doctor._between([Visit("a"), Visit("b")], {"a": 1, "b": 1})
    assert (check.status, "firewall" in check.advice) == ("fail", "firewall" in cure)
    assert cure in check.advice


def test_ranks_are_not_tried_between_hosts_whose_versions_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is the reason that they would fail, and has a line."""
    others = {"a": HERE, "b": {**HERE, "ring_notebook": "0.9"}}
    monkeypatch.setattr(doctor, "_visit", lambda name, *_: Visit(name, versions=others[name]))
    monkeypatch.setattr(doctor, "measure_allreduce", lambda _: pytest.fail("it was tried"))
    found = doctor.diagnose_hosts([doctor.Host("a", 1), doctor.Host("b", 1)])
    assert [(check.name, check.status) for check in found] == [("versions", "fail"), ("clocks", "ok")]


@pytest.mark.parametrize(
    ("kind", "found"),
    [("device", "eth0, 10 Gbit/s"), ("bonding", "eth0, 10 Gbit/s"), ("", "eth0, virtual, of unknown speed")],
)
def test_the_claim_of_a_virtual_interface_is_no_measure(
    kind: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each veth claims 10 Gbit/s: a warning about a slower link would come everywhere."""
    (tmp_path / "eth0" / kind).mkdir(parents=True)
    (tmp_path / "eth0" / "speed").write_text("10000\n")
    monkeypatch.setattr(doctor, "_INTERFACES", tmp_path)
    monkeypatch.setattr(doctor, "interface_towards", lambda _: "eth0")
    monkeypatch.setattr(doctor, "RDMA", tmp_path / "none")
    _, speed, check = doctor._network(["b"])
    assert (check.status, check.found) == ("ok", found)
    assert (speed is None) is (kind == "")


def test_a_finding_of_all_hosts_is_said_once() -> None:
    checks = [
        Check("python", "ok", "3.11.7", host="a"),
        Check("memory", "ok", "9 GiB", host="a"),
        Check("python", "ok", "3.11.7", host="b"),
        Check("memory", "warn", "0.5 GiB", "buy more", "b"),
        Check("host", "fail", "cannot be used", "look", "c"),
    ]
    assert render(checks).splitlines() == [
        "ok    python  a, b: 3.11.7",
        "ok    memory  a: 9 GiB",
        "warn  memory  b: 0.5 GiB",
        "              -> buy more",
        "fail  host    c: cannot be used",
        "              -> look",
    ]
    assert render(checks[:1]) == "ok    python  3.11.7"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Visit("b", versions=HERE), ("clocks", "ok", "no more than 0 s apart")),
        (
            Visit("b", versions={**HERE, "Python": "3.12.1"}),
            ("versions", "fail", "Python differs: 3.11 on a; 3.12 on b"),
        ),
        (Visit("b", versions={**HERE, "Python": "3.11.9"}), ("clocks", "ok", "no more than 0 s apart")),
        (Visit("b", versions={**HERE, "torch": ""}), ("versions", "warn", "torch differs: 2.13.0 on a; none on b")),
        (
            Visit("b", versions=HERE, offset=-3.0, doubt=0.1),
            ("clocks", "warn", "seen from this host that of b is"),
        ),
        (Visit("b", versions=HERE, offset=3.0, doubt=2.5), ("clocks", "ok", "no more than 5.5 s apart")),
    ],
)
def test_what_differs_between_hosts(other: Visit, expected: tuple[str, str, str]) -> None:
    first = compare([Visit("a", versions=HERE), other])[0]
    assert (first.name, first.status) == expected[:2]
    assert first.found.startswith(expected[2])
    assert bool(first.advice) is (first.status != "ok")


@pytest.mark.parametrize(("rate", "status"), [(0.9e9, "ok"), (0.4e9, "warn")])
def test_a_rate_beside_what_the_hardware_should_give(rate: float, status: str) -> None:
    check = against_limit("allreduce", "2 ranks", rate, 1e9, "its memory allows", "look")
    assert check.status == status
    assert f"{rate / 1e9:.0%} of what its memory allows (1 GB/s)" in check.found


@pytest.mark.parametrize(
    ("measured", "status", "words"),
    [
        ({"rate": 1e9}, "ok", "5 ranks of 3 hosts sum at 1 GB/s, 53% of what eth1 of b claims (1.9 GB/s)"),
        ({"rate": 1e8}, "warn", "5% of what eth1 of b claims"),
        ("rank 1 failed first", "fail", "ranks of 3 hosts cannot sum: rank 1 failed first"),
    ],
)
def test_between_hosts(monkeypatch: pytest.MonkeyPatch, measured: object, status: str, words: str) -> None:
    """Of three hosts each sends four thirds of what a rank sums."""
    asked: list[list[str]] = []
    monkeypatch.setattr(doctor, "measure_allreduce", lambda where: asked.append(where) or measured)
    visits = [Visit("a", speed=5e9, interface="eth0"), Visit("b", speed=2.5e9, interface="eth1"), Visit("c", speed=5e9)]
    check = doctor._between(visits, {"a": 2, "b": 2, "c": 1})
    assert asked == [["-np", "5", "-H", "a:2,b:2,c:1"]]
    assert check.status == status
    assert words in check.found


def test_a_disk_that_is_shared_is_known_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    token = tmp_path / "token"
    token.write_text("here")
    assert doctor._disk(str(tmp_path), str(token), "here").status == "ok"
    assert doctor._disk(str(tmp_path), str(token), "elsewhere").status == "warn"
    missing = doctor._disk(str(tmp_path / "none"), str(token), "here")
    assert (missing.status, missing.found) == ("fail", f"{tmp_path}/none: No such file or directory")


def test_an_interface_that_does_not_lead_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, found = doctor._network(["localhost"])
    assert (found.status, found.found) == ("fail", "localhost leads to this host itself")
    _, _, found = doctor._network(["no.such.host.invalid"])
    assert (found.status, found.found) == ("fail", "no route to no.such.host.invalid")
