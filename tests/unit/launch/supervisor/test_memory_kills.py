"""Which kills for lack of memory may have ended a rank."""

from __future__ import annotations

import pytest

from ring_notebook.launch.supervisor import stderr_reports


def test_a_kill_of_long_ago_says_nothing_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now, count = [1000.0], [27]
    monkeypatch.setattr(stderr_reports.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stderr_reports, "oom_kills", lambda: count[0])
    kills = stderr_reports.MemoryKills()
    assert not kills.recent

    count[0] += 1
    recent = []
    for _ in range(90):
        now[0] += 1.0
        kills.look()
        recent.append(kills.recent)
    assert all(recent[:30]), "the process may take so long to end"
    assert not any(recent[60:])


def test_where_nobody_counts_them_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_reports, "oom_kills", lambda: None)
    assert stderr_reports.MemoryKills().recent is None
