"""The text of an exception that a cell raised: bounded and valid UTF-8, whatever its class does."""

from __future__ import annotations

MOST = 10_000  # characters


def error_text(error: BaseException) -> str:
    """``str(error)``, shortened; if that raises, the type of what it raised."""
    try:
        return printable(str(error))
    except BaseException as trouble:
        return f"<its message cannot be shown: {type(trouble).__name__} in __str__>"


def printable(text: str, most: int = MOST) -> str:
    """``text`` with escapes for what UTF-8 cannot encode; a long text keeps its beginning and its end."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()
