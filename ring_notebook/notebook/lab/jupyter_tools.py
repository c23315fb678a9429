"""The tools of the laboratory in a Jupyter server, beside those that jupyter-server-mcp offers to agents there.

That extension loads `RingTools` by an entry point. Its port asks for no token, and any user of the host can reach it.
So calls are accepted only from processes of the user who runs the Jupyter server, which the operating system looks up
for each connection; and only a notebook that was opened to agents answers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fastmcp.server.dependencies import get_http_request
from fastmcp.server.middleware import Middleware
from fastmcp.tools.base import Tool, ToolResult

from ring_notebook.machine.os_calls import user_at
from ring_notebook.notebook.lab.mcp_server import asking, described
from ring_notebook.notebook.lab.tool_server import ask
from ring_notebook.notebook.lab.tools import TOOLS

PREFIX = "ring_"
"""Before our tools' names there: other packages have a ``run_cell`` too."""
_STRANGER = (
    "RefusedError: the tools of Ring Notebook take calls of processes of this user on this host alone, and not through "
    "a proxy; nothing was done"
)


class RingTools(Middleware):  # type: ignore[misc]  # fastmcp is not there where types are checked
    """Lists and calls our tools; all others it leaves to the server."""

    def __init__(self) -> None:
        self._asked = asking(ask)

    async def on_list_tools(self, context: Any, call_next: Any) -> Sequence[Tool]:
        """The tools of the server, then ours."""
        own = [Tool(name=PREFIX + name, parameters=one.input_schema, **described(one)) for name, one in TOOLS.items()]
        return [*await call_next(context), *own]

    async def on_call_tool(self, context: Any, call_next: Any) -> ToolResult:
        """The answer of one of our tools: a text of at most 30 lines, and the data that its schema describes."""
        name = context.message.name.removeprefix(PREFIX)
        if context.message.name != PREFIX + name or name not in TOOLS:
            found: ToolResult = await call_next(context)
            return found
        if not _is_own_user():
            return ToolResult(_STRANGER, is_error=True)
        client = context.fastmcp_context
        answer = await self._asked(client.session, client.report_progress, name, context.message.arguments or {})
        return ToolResult(answer["text"], answer["data"], is_error=answer["error"])


def _is_own_user() -> bool:
    """Whether a process of this user sends the request. Requests through a proxy are not accepted."""
    request = get_http_request()
    if any(name.startswith(("x-forwarded", "forwarded")) for name in request.headers):
        return False  # headers may have replaced the client's address
    here, there = request.scope.get("server"), request.scope.get("client")
    return here is not None and there is not None and user_at(tuple(there), tuple(here)) == os.geteuid()
