"""The colors of ranks, of curves, of statuses and of where time goes: in the panel, the report and the timeline."""

from __future__ import annotations

# Distinct for all kinds of color vision, and readable on white and black pages.
_COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7", "#06b6d4", "#ec4899", "#84cc16")
MEAN = "#6366f1"  # of several ranks; no single rank has this color
VALIDATION = "#db2777"
CHANGED = "#a855f7"  # of marks where a user has changed a knob
GREY = "#8791a0"
RED = "#ef4444"
# Where the time of a rank goes, in the table of ranks and on the timeline. Dull, because bright colors are ranks.
PHASE_COLORS = {
    "compute": "#64748b",
    "asleep": "#dcdcc4",
    "off_core": "#a4dca4",
    "data": "#b694c9",
    "packing": "#7d9c8a",
    "waiting": "#d3ae78",
    "bubble": "#cb8c84",
    "moving": "#aec3da",
    "sending": "#8a9a4e",
    "parting": "#8b1a3a",
}
PHASE_WORDS = {
    "compute": "compute",
    "asleep": "sleeping or waiting outside of collectives",
    "off_core": "sleeping, or waiting for a core that others use",
    "moving": "moving data",
    "waiting": "waiting for ranks",
    "bubble": "idle until a message comes",
    "data": "loading data",
}
# Also for text: on white and on black pages the contrast is at least 3 to 1.
STATUS_COLORS = {
    "running": "#3b82f6",
    "paused": CHANGED,
    "ok": "#059669",
    "failed": "#ef4444",
    "lost": "#ef4444",
    "died": "#ef4444",
    "stopped": "#d97706",
    "aborted": "#d97706",
    "interrupted": "#d97706",
}


def rank_color(index: int) -> str:
    """The color of a rank, or of the line with this index."""
    return _COLORS[index % len(_COLORS)]
