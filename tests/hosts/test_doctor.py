"""`ringrun --doctor -H`: two hosts over a real ssh, and one that does not exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.two_hosts import NAMES, TwoHosts
from ring_notebook.launch.doctor_checks import Check

DOCTOR = [str(Path(sys.executable).with_name("ringrun")), "--doctor"]


def checks(output: str) -> dict[tuple[str, str], Check]:
    return {(one["host"], one["name"]): Check(**one) for one in json.loads(output[output.index("[") :])}


@pytest.mark.slow
def test_all_hosts_are_checked_and_what_is_between_them(hosts: TwoHosts) -> None:
    found = checks(hosts.on_first([*DOCTOR, "--json", "-H", "ring-a:1,ring-b:2"]))
    for name in NAMES:
        for check in ("python", "core", "memory", "torch", "gpus", "disk", "network", "allreduce"):
            assert found[name, check].status in ("ok", "warn"), found[name, check]
        assert found[name, "network"].found == "link0, virtual, of unknown speed"
        assert found[name, "disk"].found.endswith("is shared")
    assert found["ring-a", "allreduce"].found == "one rank, which moves nothing on this host"
    assert found["ring-b", "allreduce"].found.startswith("2 ranks sum at ")
    assert found["", "clocks"].status == "ok"
    # The link has a tenth of what its interface claims, which is virtual and not believed.
    between = found["", "between hosts"]
    assert between.status == "ok", between
    assert between.found.startswith("3 ranks of 2 hosts sum at 0.")


@pytest.mark.slow
def test_a_host_that_does_not_exist_hides_nothing_of_the_others(hosts: TwoHosts) -> None:
    with pytest.raises(AssertionError) as failed:  # which says what was printed
        hosts.on_first([*DOCTOR, "--json", "-H", "ring-a,nosuch:2"])
    found = checks(str(failed.value).partition("\nassert")[0])
    assert found["ring-a", "python"].status == "ok"
    lost = found["nosuch", "host"]
    assert lost.status == "fail"
    assert "cannot be used: exit code 255: ssh: Could not resolve hostname nosuch" in lost.found
    assert lost.advice.startswith("try it: ssh ")
    assert lost.advice.endswith(" nosuch true")
