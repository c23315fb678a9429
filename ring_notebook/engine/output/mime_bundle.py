"""A MIME bundle as it can travel: pictures in base64, everything else as JSON says it."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

__all__ = ["portable"]

# A widget's model lives in this engine, where no page asks for it.
_WIDGET = "application/vnd.jupyter.widget-view+json"
_ADVICE = (
    "{}: widgets work in the notebook's own process only; make it in a cell without %%ringtrain (or with %%local), and "
    "`%ring push` its value to the ranks"
)


def portable(data: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``data`` and ``metadata`` with strings and JSON for values. What has no JSON becomes its ``str``.

    In place of a widget there is a line of text that says what to do.
    """
    if _WIDGET in data:
        return {"text/plain": _ADVICE.format(str(data.get("text/plain", "a widget")).partition("(")[0])}, {}
    return {mime: _value(value) for mime, value in data.items()}, _value(metadata)


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value if isinstance(value, str) else json.loads(json.dumps(value, default=str))
