"""A MIME bundle as it can travel: pictures in base64, everything else as JSON says it."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

__all__ = ["portable"]

# A widget's model lives in this engine, where no page asks for it: what remains of it is its text.
_BOUND_HERE = {"application/vnd.jupyter.widget-view+json"}


def portable(data: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``data`` and ``metadata`` with strings and JSON for values. What has no JSON becomes its ``str``."""
    return {mime: _value(value) for mime, value in data.items() if mime not in _BOUND_HERE}, _value(metadata)


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value if isinstance(value, str) else json.loads(json.dumps(value, default=str))
