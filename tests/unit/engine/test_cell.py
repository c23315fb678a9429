"""Cells: those that continue another run, at which statement and values of loops; and which package one imports."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.engine import cell as cells
from ring_notebook.engine.cell import Begin, Cell


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell.instance()
    before = dict(made.user_ns)
    yield made
    made.user_ns.clear()
    made.user_ns.update(before)
    if cells._loop is not None:
        cells._loop.close()
        cells._loop = None
    gc.collect()  # asyncio reports tasks that are left here


CELL = """seen = []
for epoch in range(4):
    for part in ["a", "b"]:
        for x in iter([1, 2]):
            seen.append((epoch, part, x))
seen.append("end")
"""
FROM_2B = [(2, "b", 1), (2, "b", 2), *((3, part, x) for part in "ab" for x in (1, 2)), "end"]
ALL_FROM_B = [(0, "b", 1), (0, "b", 2), *((n, part, x) for n in (1, 2, 3) for part in "ab" for x in (1, 2)), "end"]


@pytest.mark.parametrize(
    ("begin", "variables", "expected"),
    [
        (Begin(1, 5, items=[2, 1, -1]), {}, FROM_2B),
        (Begin(1, 5, items=[3, 0, -1]), {}, FROM_2B[2:]),
        (Begin(1, 3, behind=True, items=[2, 0]), {}, FROM_2B),
        (Begin(1, 3, behind=True, items=[3, 1]), {}, ["end"]),
        (Begin(1, 5, items=[-1, 1, -1]), {}, ALL_FROM_B),
        (Begin(2, 6), {"epoch": 2}, ["end"]),
        (Begin(3, 7), {}, []),
    ],
)
def test_loops_continue(shell: InteractiveShell, begin: Begin, variables: dict[str, object], expected: object) -> None:
    shell.user_ns.update(variables, seen=[])
    Cell(shell, CELL, "run", begin=begin).execute()
    assert shell.user_ns["seen"] == expected


@pytest.mark.parametrize("items", ["[v, w, v, 7]", "(v, w, v, 7)", "[1, 2, 1, 7]"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_loop_continues_at_its_item_and_not_at_an_equal_one(
    shell: InteractiveShell, items: str, behind: bool
) -> None:
    """Where the items are arrays, two of which can be compared only element by element."""
    source = f"for n in range(2):\n    for x in {items}:\n        at(x)\n        if True:\n            seen.append(x)\n"
    places: list[Begin] = []
    v, w = np.zeros(2), np.ones(2)
    seen: list[object] = []
    shell.user_ns.update(v=v, w=w, seen=seen, at=lambda _: places.append(cell.place()))
    cell = Cell(shell, source, "run")
    cell.execute()
    every, number = list(seen), 6  # the third of the second pass
    assert places[number].items == [1, 2]
    seen.clear()
    Cell(shell, source, "branch", begin=replace(places[number], behind=behind)).execute()
    assert list(map(id, seen)) == list(map(id, every[number + behind :]))


def test_the_outermost_import_is_named(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_package.py").write_text("import inner_package")
    (tmp_path / "inner_package.py").write_text("import asks; asks.seen.append(asks.importing())")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = Cell(shell, "import outer_package\nimport asks\nasks.seen.append(asks.importing())", "run")
    asks = SimpleNamespace(seen=[], importing=cell.importing)
    monkeypatch.setitem(sys.modules, "asks", asks)  # type: ignore[arg-type]
    cell.execute()
    assert asks.seen == ["outer_package", ""]


STOP = """
import asyncio
def stop(): raise KeyboardInterrupt
async def other():
    while True:
        await asyncio.sleep(0.01); others.append(1)
kept = asyncio.create_task(other())
asyncio.get_running_loop().call_later(0.05, stop)
"""
LATER = "import asyncio; await asyncio.sleep(0.1)"


def test_a_cell_that_was_stopped_at_an_await_ends(shell: InteractiveShell) -> None:
    """Its clean-up runs; the tasks that it has started go on."""
    done: list[str] = []
    others: list[int] = []
    shell.user_ns.update(done=done, others=others)
    waits = (
        "try:\n    while True: await asyncio.sleep(0.01); done.append('step')\n"
        "finally:\n    await asyncio.sleep(0.01); done.append('end')"
    )
    with pytest.raises(KeyboardInterrupt):
        Cell(shell, STOP + waits, "stopped").execute()
    seen, before = list(done), len(others)
    assert seen[-1] == "end"
    Cell(shell, LATER, "later").execute()
    assert done == seen
    assert len(others) > before
    Cell(shell, "kept.cancel()\n" + LATER, "last").execute()


@pytest.mark.parametrize("again", ["", "asyncio.get_running_loop().call_later(0.01, stop)"], ids=["once", "twice"])
def test_a_cell_that_does_not_end_when_cancelled_is_left(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: str
) -> None:
    monkeypatch.setattr(cells, "_SECONDS_TO_END", 1000.0 if again else 0.1)
    done: list[int] = []
    shell.user_ns.update(done=done, others=[])
    waits = "while True:\n    try: await asyncio.sleep(0.01); done.append(1)\n    except asyncio.CancelledError: "
    with pytest.raises(KeyboardInterrupt):
        Cell(shell, f"{STOP}{waits}{again or 0}", "stopped").execute()
    assert "has not ended" in capsys.readouterr().err
    seen = len(done)
    Cell(shell, LATER, "later").execute()
    assert len(done) == seen


def test_an_error_of_another_task_that_leaves_the_loop_ends_the_cell(shell: InteractiveShell) -> None:
    done: list[int] = []
    shell.user_ns.update(done=done)
    source = (
        "import asyncio\nasync def leave(): raise SystemExit(3)\nleaving = asyncio.create_task(leave())\n"
        "while True: await asyncio.sleep(0.01); done.append(1)"
    )
    with pytest.raises(SystemExit):
        Cell(shell, source, "left").execute()
    assert isinstance(shell.user_ns["leaving"].exception(), SystemExit)
    seen = len(done)
    Cell(shell, LATER, "later").execute()
    assert len(done) == seen


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("ring.rank?", {"ring"}),
        ("%time ring.rank()", {"ring"}),
        ("get_ipython().run_line_magic(*asked)", {"asked"}),
        ("get_ipython().run_cell_magic('time', '', '\\0')", set()),
    ],
)
def test_names_that_magics_hide(shell: InteractiveShell, source: str, names: set[str]) -> None:
    assert Cell(shell, source, "run").names() == {"get_ipython"} | names
