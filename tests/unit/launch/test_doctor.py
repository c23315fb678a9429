"""The doctor: well on a machine that passes these tests, and exact about what is amiss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ring_notebook import config as settings
from ring_notebook.launch import doctor
from ring_notebook.launch.doctor import Check, diagnose, render


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    settings.config.cache_clear()
    yield
    settings.config.cache_clear()


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_machine_that_passes_the_tests_is_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ring_notebook.launch.cli", "--doctor"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "compiled, kernels for" in done.stdout
    assert "two ranks connected" in done.stdout
    assert "\nfail" not in done.stdout


def test_what_is_amiss_does_not_hide_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_MPIEXEC", "/no/such/mpiexec")
    monkeypatch.setattr(doctor, "_LOOKS", (doctor._python, doctor._mpi, doctor._cores))
    checks = by_name(diagnose())
    assert checks["mpi"].status == "fail"
    assert "/no/such/mpiexec does not run" in checks["mpi"].found
    assert checks["python"].status == checks["cores"].status == "ok"


def test_ranks_that_do_not_meet_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = tmp_path / "mpiexec"
    # An mpiexec of the right name that starts ranks which know nothing of one another.
    alone.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nshift 2\n"$@"\n"$@"\n')
    alone.chmod(0o755)
    monkeypatch.setenv("RING_MPIEXEC", str(alone))
    check = doctor._mpi()
    assert check.status == "fail"
    assert "starts ranks that found sizes 1 1, expected 2 2" in check.found
    assert "RING_MPIEXEC" in check.advice


def test_settings_that_are_not_at_their_defaults_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RING_ALGORITHM", "ring")
    assert "algorithm=ring" in doctor._settings().found


def test_the_table_puts_what_to_do_under_what_was_found() -> None:
    table = render([Check("core", "ok", "compiled"), Check("memory", "warn", "0.5 GiB", "buy more")])
    assert table.splitlines() == ["ok    core    compiled", "warn  memory  0.5 GiB", "              -> buy more"]
