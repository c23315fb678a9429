"""Our tools in a Jupyter server: within jupyter-server-mcp, and beside jupyter-mcp-server, by clients over HTTP.

They live in an environment of their own: ``make test-jupyter``.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from harness.programs import ran

pytest.importorskip("jupyter_mcp_server", reason="lives in an environment of its own: make test-jupyter")
pytest.importorskip("jupyter_server_mcp", reason="lives in an environment of its own: make test-jupyter")

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import Implementation

from harness.waiting import until
from ring_notebook.notebook.lab.tools import TOOLS

TOKEN = "a-token"
EXTENSIONS = {"jupyter_mcp_server": True, "jupyter_server_mcp": True, "jupyter_server_ydoc": True}
FAILS = "if ring.rank() == 1:\n    raise ValueError('bad batch')\nring.barrier()"
PROGRAM = """
import json, sys, urllib.request
url, *headers = sys.argv[1:]
def post(session, **body):
    known = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **session}
    known.update(one.split("=", 1) for one in headers)
    data = json.dumps({"jsonrpc": "2.0", "id": 1, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, known), timeout=30) as answer:
        return {"mcp-session-id": answer.headers["mcp-session-id"] or ""}, answer.read().decode()
about = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "stranger", "version": "1"}}
session, _ = post({}, method="initialize", params=about)
print(post(session, method="tools/call", params={"name": "ring_runs", "arguments": {}})[1])
"""


class Servers:
    """A Jupyter server with both extensions, and clients of theirs; ``folder`` is that of its notebooks."""

    def __init__(self, folder: Path, mcp: str, jupyter: str) -> None:
        self.folder = folder
        self.mcp = mcp
        self.jupyter = f"{jupyter}mcp"

    def ask(self, *calls: tuple[str, dict[str, Any]], peer: bool = False, stdio: bool = False) -> list[Any]:
        """The answers to calls: of our tools in jupyter-server-mcp, of jupyter-mcp-server, or of our own server."""
        passed = {
            name: value for name, value in os.environ.items() if name.startswith(("RING_", "PYTHON", "XDG_", "TMP"))
        }
        ours = StdioServerParameters(
            command=sys.executable, args=["-m", "ring_notebook.notebook.lab.mcp_server"], env=passed, cwd=self.folder
        )

        async def asked() -> list[Any]:
            async with httpx2.AsyncClient(headers={"Authorization": f"token {TOKEN}"}, timeout=200) as http:
                at = streamable_http_client(self.jupyter, http_client=http) if peer else ours if stdio else self.mcp
                async with Client(at, client_info=Implementation(name="scripted", version="1")) as client:
                    return [await client.call_tool(tool, given) for tool, given in calls]

        return anyio.run(asked)

    def listed(self) -> list[Any]:
        async def tools() -> list[Any]:
            async with Client(self.mcp) as client:
                return (await client.list_tools()).tools

        return anyio.run(tools)

    def cell(self, source: str) -> str:
        """What the notebook prints, in which jupyter-mcp-server runs a cell."""
        (found,) = self.ask(("execute_code", {"code": source, "timeout": 60}), peer=True)
        return "".join(one.text for one in found.content)

    def stranger(self, *headers: str) -> str:
        """What another user of this host gets as the answer to a call of ours."""
        command = ["/usr/bin/env", "-i", "/usr/bin/python3", "-c", PROGRAM, self.mcp, *headers]
        done = ran(command, user="nobody", group=65534, extra_groups=[])
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, own = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyter")
    dirs = {f"JUPYTER_{name}_DIR": str(own / name) for name in ("CONFIG", "RUNTIME")}
    command = [sys.executable, "-m", "jupyter_server", "--allow-root", "--no-browser", "--ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--IdentityProvider.token={TOKEN}", "--MCPExtensionApp.mcp_port=0"]
    command += [f"--ServerApp.jpserver_extensions={EXTENSIONS}", "--MCPExtensionApp.mcp_tools=platform:node"]
    with open(own / "log", "wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=os.environ | dirs, stdout=log, stderr=log)
    try:
        until(lambda: [*own.glob("RUNTIME/jpserver-mcp-*.json")] or server.poll() is not None, 90)
        assert server.poll() is None, (own / "log").read_text()
        urls = {
            path.name.startswith("jpserver-mcp"): json.loads(path.read_text())["url"]
            for path in own.glob("RUNTIME/*.json")
        }
        yield Servers(folder, urls[True], urls[False])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


@pytest.fixture
def opened(servers: Servers) -> Iterator[Servers]:
    """A notebook that jupyter-mcp-server has made, with a cluster that is open to agents."""
    servers.ask(("use_notebook", {"notebook_name": "one", "notebook_path": "one.ipynb", "mode": "create"}), peer=True)
    assert "Started 2 engines" in servers.cell("%load_ext ring_notebook\n%ring start -n 2")
    assert "may read, run" in servers.cell("%ring share agents --may read,run --seconds 60")
    yield servers
    servers.cell("%ring share agents off\n%ring stop")


def test_tools_are_listed_and_closed_until_a_person_opens_a_notebook(servers: Servers) -> None:
    found = {tool.name: tool for tool in servers.listed()}
    assert {f"ring_{name}" for name in TOOLS} | {"node"} <= {*found}, "ours, beside that of another package"
    assert found["ring_verdict"].input_schema == TOOLS["verdict"].input_schema
    assert found["ring_verdict"].annotations.read_only_hint
    (refused,) = servers.ask(("ring_status", {}))
    assert refused.is_error
    assert "is open to agents; type `%ring share agents` in it" in refused.content[0].text


def test_a_run_of_an_agent_over_http_in_the_notebook_of_another_server(opened: Servers) -> None:
    """A cell through jupyter-mcp-server, and our tools in the same Jupyter server and over standard input."""
    opened.cell("%%ringtrain --name theirs\nvalue = ring.rank()\nprint('of the notebook', value)")
    run, waited, changed, started = opened.ask(
        ("ring_run_cell", {"cell": FAILS, "name": "ours"}),
        ("ring_wait", {"timeout": 60}),
        ("ring_pause", {}),
        ("ring_run_cell", {"cell": "1", "seconds": 61}),
    )
    assert run.structured_content["asked_by"] == "scripted 1"
    error = waited.structured_content["verdict"]["error"]
    assert (error["type"], error["ranks"], error["line"]) == ("ValueError", [1], 2)
    assert "error: ValueError on rank 1, line 2" in waited.content[0].text
    assert "needs the permission 'steer'; you may read, run" in changed.content[0].text
    assert "a run may take at most 60 s" in started.content[0].text
    output, verdict = opened.ask(("output", {"run": "theirs"}), ("verdict", {"run": "ours"}), stdio=True)
    assert output.structured_content["text_of_ranks"] == ["[0] of the notebook 0", "[1] of the notebook 1"]
    assert verdict.structured_content["error"] == error
    listed = opened.cell("%ring runs calls")
    assert re.search(r"scripted 1 +pause .*refused: RefusedError", listed), listed
    assert re.search(r"scripted 1 +wait .* ok", listed)


def test_progress_is_told_and_a_client_that_leaves_ends_its_wait_alone(opened: Servers) -> None:
    told: list[str] = []

    async def progress(_: float, __: float | None, message: str | None) -> None:
        told.append(str(message))

    async def waits() -> None:
        async with Client(opened.mcp) as client:
            await client.call_tool(
                "ring_run_cell", {"cell": "import time\nwhile True: ring.log(loss=1.0); time.sleep(0.01)"}
            )
            with anyio.move_on_after(60):
                async with anyio.create_task_group() as group:

                    async def wait() -> None:
                        await client.call_tool("ring_wait", {"timeout": 60}, progress_callback=progress)

                    group.start_soon(wait)
                    while not told or "loss" not in told[-1]:
                        await anyio.sleep(0.05)
                    group.cancel_scope.cancel()
            assert (await client.call_tool("ring_verdict", {})).structured_content["status"] == "running"

    anyio.run(waits)
    assert re.fullmatch(r".*: step [\d,]+ loss 1", told[-1]), told
    listed: Callable[[], str] = lambda: opened.cell("%ring runs calls")  # noqa: E731
    until(lambda: re.search(r" wait .*ok", listed()) is not None, 30)
    opened.cell("%ring stop --runs")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_of_the_host_is_refused(opened: Servers) -> None:
    """The port of jupyter-server-mcp asks for no token; also not where he claims the connection of the person."""
    assert pwd.getpwnam("nobody").pw_uid != os.geteuid()
    (own,) = opened.ask(("ring_runs", {}))
    assert not own.is_error
    place = urlsplit(opened.mcp)
    assert "take calls of processes of this user on this host alone" in opened.stranger()
    with socket.create_connection(("127.0.0.1", place.port)) as persons:
        claimed = f"127.0.0.1:{persons.getsockname()[1]}"
        for header in ("X-Forwarded-For", "Forwarded"):
            said = opened.stranger(f"{header}={claimed}")
            assert "take calls of processes of this user on this host alone" in said, said
    assert not re.search("stranger", opened.cell("%ring runs calls"))
