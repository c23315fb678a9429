"""What the doctor says of several hosts, from what each has answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.launch import doctor
from ring_notebook.launch.doctor import Visit, compare, render
from ring_notebook.launch.doctor_checks import Check, against_limit

SAME = {"ring_notebook": "1.0", "Python": "3.11.7", "torch": "2.13.0"}


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
        (Visit("b", versions=SAME), ("clocks", "ok", "no more than 0 s apart")),
        (
            Visit("b", versions={**SAME, "Python": "3.12.1"}),
            ("versions", "fail", "Python differs: 3.11 on a; 3.12 on b"),
        ),
        (Visit("b", versions={**SAME, "Python": "3.11.9"}), ("clocks", "ok", "no more than 0 s apart")),
        (Visit("b", versions={**SAME, "torch": ""}), ("versions", "warn", "torch differs: 2.13.0 on a; none on b")),
        (
            Visit("b", versions=SAME, offset=-3.0, doubt=0.1),
            ("clocks", "warn", "seen from this host that of b is"),
        ),
        (Visit("b", versions=SAME, offset=3.0, doubt=2.5), ("clocks", "ok", "no more than 5.5 s apart")),
    ],
)
def test_what_differs_between_hosts(other: Visit, expected: tuple[str, str, str]) -> None:
    first = compare([Visit("a", versions=SAME), other])[0]
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
