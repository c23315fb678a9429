"""`make nightly` runs every target of the Makefile but some that it names; a failure is told and stops nothing."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
MAKEFILE = """
.PHONY: help good bad slow last
good last:
	@echo pictures in $(PICTURES), arguments $(ARGS)
bad:
	@echo the reason; exit 3
slow:
	@sleep 600
"""


@pytest.fixture
def nightly() -> ModuleType:
    loader = SourceFileLoader("nightly", str(ROOT / ".ci" / "nightly"))
    spec = spec_from_loader("nightly", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_what_is_left_out_is_a_target(nightly: ModuleType) -> None:
    text = (ROOT / "Makefile").read_text()
    declared = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    assert set(nightly.EXCEPT) < set(declared)
    assert nightly.targets(text) == [name for name in declared if name not in nightly.EXCEPT]


def test_a_failure_stops_no_other_target_and_is_the_exit_code(
    nightly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name, value in (("ROOT", tmp_path), ("LOGS", tmp_path / "logs"), ("LIMIT", 2.0)):
        monkeypatch.setattr(nightly, name, value)
    monkeypatch.setenv("ARGS", "for nightly alone")
    assert nightly.main([]) == 1
    table = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in table] == ["target", "good", "bad", "slow", "last"]
    pictures = f"pictures in {tmp_path / 'logs'}, arguments"
    assert [row[2].split(maxsplit=1)[0] for row in table[1:]] == ["ok", "exit", "killed", "ok"]
    assert pictures in table[1][2]
    assert "the reason" in table[2][2]
    assert nightly.main(["good"]) == 0
