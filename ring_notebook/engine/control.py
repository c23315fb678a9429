"""Answers the kernel beside the cell that runs: on the engine's control channel, in a thread of its own."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from ring_notebook.error_text import error_text
from ring_notebook.question import CONTROL

__all__ = ["serve"]


def serve(kernel: Any) -> None:
    """Have the engine's ``kernel`` call the functions that `Engines.call_beside` names. They must not wait."""

    def on_request(stream: Any, ident: Any, request: dict[str, Any]) -> None:
        content = _answer(request["content"])
        kernel.session.send(stream, CONTROL.replace("request", "reply"), content, request, ident)

    kernel.control_handlers[CONTROL] = on_request


def _answer(content: dict[str, Any]) -> dict[str, Any]:
    """What the function returns, or why it failed, as JSON."""
    try:
        module, _, name = content["function"].partition(":")
        result = getattr(import_module(module), name)(*content["args"])
        json.dumps(result)  # what is none cannot be sent, and the caller would wait
        return {"result": result}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error_text(error)}"}
