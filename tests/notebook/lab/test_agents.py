"""Agents without a model: MCP clients over standard input that do what people do with runs, on real clusters."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import Implementation

from harness.doc_tables import table
from notebook.kernel import Notebook
from ring_notebook.notebook.lab.answers import MOST_LINES
from ring_notebook.notebook.lab.tools import TOOLS

TRAINING = """
import torch
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
data = torch.Generator().manual_seed(ring.rank())
for step in range(5000):
    x = torch.randn(16, 8, generator=data)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ring.log(loss=loss)
"""
SLOW = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3] / "benchmarks")!r})
import slow_ranks
slow_ranks.train("asleep", 0, 100, None)
"""
FAILS = """
import torch
size = 4
if ring.rank() == 1:
    size = 5
part = torch.ones(size)
total = part.reshape(2, 2).sum()
print("total", ring.allreduce(total, op=ring.Sum).item())
"""
BREAKS = """
import torch
scale = knob_scale = ring.knob("scale", 1.0, low=0.1, high=100.0)
model = torch.nn.Linear(4, 1)
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
for step in range(400):
    x = torch.ones(8, 4) * (float("nan") if step == BAD and float(scale) > 0.5 else 1.0)
    loss = (model(x) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ring.log(loss=loss)
"""
_PASSED = ("RING_", "OMP_", "PYTHON", "LANG", "LC_", "XDG_", "TMP")  # with another language ranks are not forked
SERVER = [sys.executable, "-m", "ring_notebook.notebook.lab.mcp_server"]


class Agent:
    """An MCP client that counts its calls; every answer is checked against the schema of its tool."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.calls = 0
        self.texts: list[str] = []

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The data of an answer; fails when it is an error."""
        self.calls += 1
        found = await self.client.call_tool(tool, arguments)
        text = found.content[0].text  # type: ignore[union-attr]
        assert not found.is_error, text
        assert len(text.splitlines()) <= MOST_LINES
        self.texts.append(text)
        data: dict[str, Any] = found.structured_content
        return data

    async def error(self, tool: str, **arguments: Any) -> str:
        """What the error of a call says."""
        self.calls += 1
        found = await self.client.call_tool(tool, arguments)
        assert found.is_error, found
        return str(found.content[0].text)  # type: ignore[union-attr]


def as_agent(script: Callable[[Agent], Awaitable[None]], *options: str, folder: Path | None = None) -> Agent:
    """Run an agent's script with a server of its own, and print its seconds and calls."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    server = StdioServerParameters(command=SERVER[0], args=[*SERVER[1:], *options], env=passed, cwd=folder)
    made: list[Agent] = []

    async def session() -> None:
        async with Client(server, client_info=Implementation(name="scripted", version="1")) as client:
            made.append(Agent(client))
            await script(made[0])

    began = time.monotonic()
    anyio.run(session)
    print(f"\n{getattr(script, '__name__', '')}: {time.monotonic() - began:.1f} s, {made[0].calls} calls")  # noqa: T201
    return made[0]


def claimed(agent: str) -> int:
    """The calls that the documentation says an agent makes."""
    return next(int(calls) for name, calls, _ in table("agents.md", "| Agent | Calls |") if name.startswith(agent))


@pytest.mark.slow
def test_an_agent_finds_a_learning_rate_in_ten_branches() -> None:
    rates = [10.0 ** (-4 + index / 2) for index in range(10)]  # 1e-4 ... 3

    async def learning_rate(agent: Agent) -> None:
        base = await agent("run_cell", cell=TRAINING, name="base", steps=20, keep=True)
        assert base["asked_by"] == "scripted 1"
        await agent("wait", run="base", timeout=120)
        made = await agent("branch", run="base", settings=[{"lr": rate} for rate in rates], steps=100)
        names = [row[0] for row in made["rows"]]
        assert len(set(names)) == 10
        losses = {}
        for name, rate in zip(names, rates, strict=True):
            found = await agent("wait", run=name, timeout=120)
            assert found["verdict"]["ended_by"] == "its limit of 100 steps", found
            losses[rate] = found["verdict"]["metrics"]["loss"]["last"]
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        best = min(finite, key=finite.__getitem__)
        assert 0.01 <= best <= 0.4, losses
        assert finite[best] < 0.05 * finite[rates[0]], losses
        compared = await agent("compare", runs=[names[0], names[5]])
        assert any(row[0] == "lr" for row in compared["differs"]["rows"])

    assert as_agent(learning_rate, "--start", "2").calls == claimed("finds a learning rate")


@pytest.mark.slow
def test_an_agent_finds_the_slow_rank_and_its_cause(tmp_path: Path) -> None:
    """One of ten faults of `benchmarks/slow_ranks.py`, which tries all of them without an agent."""
    place = r".*slow_ranks\.py, line \d+, in <lambda>"

    async def slow_rank(agent: Agent) -> None:
        await agent("run_cell", cell=SLOW, seconds=100)
        assert (await agent("wait", until="a rank is slow", timeout=90))["reached"]
        looks: list[Any] = []
        while not looks or looks[-1] is None or looks[-3:] != looks[-1:] * 3:  # the first steps may say something else
            assert len(looks) < 20, looks
            slow = (await agent("wait", timeout=1))["verdict"]["slow"]
            looks.append(slow and (slow["ranks"], slow["cause"]))
        # On a busy machine a rank may wait longer for a processor than it sleeps.
        assert looks[-1] in [([random.Random(0).randrange(2)], cause) for cause in ("asleep", "queued")], looks
        while not any(re.fullmatch(place, one) for one in (await agent("stacks"))["text_of_ranks"]):
            assert agent.calls < 50, agent.texts[-1]  # it also does other things
        assert (await agent("stop"))["message"] == "done"
        ended = await agent("verdict")
        assert (ended["status"], ended["ended_by"]) == ("interrupted", "scripted 1")

    as_agent(slow_rank, "--start", "2", folder=tmp_path)


def test_an_agent_repairs_a_cell_that_fails_on_one_rank() -> None:
    async def repair(agent: Agent) -> None:
        await agent("run_cell", cell=FAILS)
        error = (await agent("wait"))["verdict"]["error"]
        assert (error["ranks"], error["line"]) == ([1], 7)
        assert "invalid for input of size 5" in error["message"]["from_ranks"]
        source = (await agent("cell"))["text_of_ranks"]
        line = next(index for index, text in enumerate(source) if "reshape" in text)
        assert error["code"]["from_ranks"] in source[line]
        source[line] = source[line].replace(".reshape(2, 2)", "")
        await agent("run_cell", cell="\n".join(source))
        verdict = (await agent("wait"))["verdict"]
        assert (verdict["status"], verdict["output"][0]["from_ranks"]) == ("ok", "[0-1] total 9.0")

    assert as_agent(repair, "--start", "2").calls == claimed("repairs a cell")


@pytest.mark.slow
def test_an_agent_bisects_the_step_at_which_the_loss_becomes_nan() -> None:
    bad = 237

    async def bisect(agent: Agent) -> None:
        """As if the verdict did not say it: by runs with limits of steps."""
        low, high = 0, 400
        while high - low > 1:
            middle = (low + high) // 2
            await agent("run_cell", cell=BREAKS.replace("BAD", str(bad)), steps=middle + 2)
            loss = (await agent("wait"))["verdict"]["metrics"]["loss"]
            low, high = (low, middle) if loss["broken"] else (middle, high)
        assert high == bad, (low, high)
        assert loss["broken"] == "" or loss["broken_step"] == bad

    assert as_agent(bisect, "--start", "1").calls == claimed("bisects the step")


@pytest.mark.slow
def test_tools_and_resources_are_described_and_clusters_managed() -> None:
    async def look(agent: Agent) -> None:
        tools = (await agent.client.list_tools()).tools
        assert [tool.name for tool in tools] == [*TOOLS]
        for tool in tools:
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
            assert tool.description
            assert "Needs the permission" in tool.description
        await agent("run_cell", cell="ring.log(**{'loss<b>': 1.0})", name="one/two")
        await agent("wait")
        uris = [str(one.uri) for one in (await agent.client.list_resources()).resources]
        assert uris[:2] == ["ring://runs", "ring://runs/one%2Ftwo"]
        for uri, kind in (
            (uris[1], "text/plain"),
            (f"{uris[1]}/loss%3Cb%3E.svg", "image/svg+xml"),
            (uris[0], "text/plain"),
        ):
            (content,) = (await agent.client.read_resource(uri)).contents
            assert content.mime_type == kind
            assert "one/two" in content.text or "<svg" in content.text  # type: ignore[union-attr]
            assert "<b>" not in content.text or kind == "text/plain"  # type: ignore[union-attr]

        await agent("stop_cluster")
        assert (await agent("status"))["note"].startswith("there is no cluster; you may read, run, manage")
        assert "at most 1 ranks are allowed, asked for 9" in await agent.error("start_cluster", n=9)
        assert [row[0] for row in (await agent("start_cluster"))["rows"]] == ["0"]
        assert "a cluster runs already" in await agent.error("start_cluster", n=1)

    as_agent(look, "--start", "1", "--may", "read,run,manage")


@pytest.mark.slow
def test_progress_is_told_and_a_cancelled_wait_leaves_the_run() -> None:
    async def wait(agent: Agent) -> None:
        await agent("run_cell", cell="import time\nwhile True: ring.log(loss=1.0); time.sleep(0.01)", name="long")
        told: list[str] = []

        async def progress(_: float, __: float | None, message: str | None) -> None:
            told.append(str(message))

        with anyio.move_on_after(30) as scope:
            async with anyio.create_task_group() as group:

                async def waits() -> None:
                    await agent.client.call_tool("wait", {"timeout": 60}, progress_callback=progress)

                group.start_soon(waits)
                while not told or "loss" not in told[-1]:
                    await anyio.sleep(0.05)
                group.cancel_scope.cancel()
        assert not scope.cancelled_caught
        assert re.fullmatch(r"long: step [\d,]+ loss 1", told[-1]), told
        assert (await agent("verdict"))["status"] == "running"
        await agent("stop")

    as_agent(wait, "--start", "1")


@contextmanager
def opened(notebook: Notebook, line: str) -> Iterator[str]:
    yield notebook.text(f"%ring share agents {line}")
    notebook.text("%ring share agents off")


@pytest.mark.slow
def test_a_notebook_says_what_agents_may_do_and_shows_what_they_did(notebook: Notebook) -> None:
    os.environ["RING_RUNS_DIR"], before = (
        notebook.text("import os; print(os.environ['RING_RUNS_DIR'])").strip(),
        os.environ["RING_RUNS_DIR"],
    )
    try:
        notebook.text("%%ringtrain --name mine\nprint('of the person')")

        async def closed(agent: Agent) -> None:
            assert "is open to agents; type `%ring share agents` in it" in await agent.error("status")

        async def reads(agent: Agent) -> None:
            assert (await agent("output", run="mine"))["text_of_ranks"] == ["[0-1] of the person"]
            assert (await agent("status"))["note"] == "you may read; a run at most 600 s"
            said = await agent.error("run_cell", cell="print(1)")
            assert said == "RefusedError: run_cell needs the permission 'run'; you may read; a run at most 600 s"

        async def runs(agent: Agent) -> None:
            assert "a run may take at most 20 s, asked for 60 s" in await agent.error("run_cell", cell="1", seconds=60)
            assert "at most 1 ranks are allowed, asked for 2" in await agent.error("run_cell", cell="1", n=2)
            found = await agent("run_cell", cell="import time\nwhile True: time.sleep(0.01)", name="theirs")
            assert found["ranks"] == 1
            # The person's Stop, while the agent waits.
            async with anyio.create_task_group() as group:

                async def stop() -> None:
                    await anyio.sleep(1)
                    await anyio.to_thread.run_sync(notebook.text, "%ring stop --runs")

                group.start_soon(stop)
                verdict = (await agent("wait", timeout=60))["verdict"]
            assert (verdict["status"], verdict["ended_by"]) == ("interrupted", "a person")

        as_agent(closed)
        with opened(notebook, "") as said:
            assert "may read; a run at most 600 s" in said
            as_agent(reads)
        with opened(notebook, "--may read,run --seconds 20 -n 1"):
            as_agent(runs)
        as_agent(closed)
        assert "theirs" in notebook.text("%ring runs --all")
        listed = notebook.text("%ring runs calls")
        assert re.search(r"scripted 1 +run_cell .*refused: RefusedError: run_cell needs", listed), listed
        assert re.search(r"scripted 1 +wait .* ok", listed)
        report = "".join(str(cell.outputs) for cell in notebook.document.cells)
        assert "asked by scripted 1" in report
    finally:
        os.environ["RING_RUNS_DIR"] = before


@pytest.mark.parametrize("options", [["--may", "all", "--start", "1"]])
def test_a_permission_that_does_not_exist_ends_the_server(options: list[str]) -> None:
    done = subprocess.run([*SERVER, *options], capture_output=True, text=True, input="", timeout=60)
    assert done.returncode == 1
    assert "no permission all; there are: read, steer, run, manage" in done.stderr
