"""The view of a timeline: a bar per thing that a rank did, drawn by Vega-Lite, which JupyterLab has built in.

It needs no kernel and no network, so it can still be zoomed in a notebook that is opened again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_notebook.notebook.style import GREY, PHASE_COLORS
from ring_notebook.notebook.timeline.spans import HELD, Span

__all__ = ["MIME", "spec"]

MIME = "application/vnd.vegalite.v5+json"
MOST_BARS = 3000  # of some 100 bytes each in the saved notebook


def spec(spans: Sequence[Span]) -> dict[str, Any]:
    """A Vega-Lite chart of the spans; dragging and the wheel move and zoom the time axis.

    Neighbours that are too close to be told apart are drawn as one bar when there are more than MOST_BARS.
    """
    spans = [span for span in spans if span.phase not in HELD]  # what the program waited for is drawn already
    ranks = sorted({span.rank for span in spans})
    begin, end = min((s.begin for s in spans), default=0.0), max((s.end for s in spans), default=0.0)
    bars = [
        {
            "rank": rank,
            "phase": "compute",
            "begin": round(begin, 6),
            "end": round(end, 6),
            "what": "outside collectives",
        }
        for rank in ranks
    ]
    bars += [_bar(group) for group in _joined(spans, end - begin)]
    used = [phase for phase in PHASE_COLORS if any(bar["phase"] == phase for bar in bars)]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": 720,
        "height": {"step": max(6, min(26, 400 // max(1, len(ranks))))},
        "background": "transparent",
        "config": {
            "axis": {"labelColor": GREY, "titleColor": GREY, "gridOpacity": 0.3},
            "legend": {"labelColor": GREY, "titleColor": GREY},
            "view": {"stroke": None},
        },
        "data": {"values": bars},
        "params": [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}],
        "mark": {"type": "bar", "clip": True},
        "encoding": {
            "y": {"field": "rank", "type": "ordinal", "title": "rank"},
            "x": {
                "field": "begin",
                "type": "quantitative",
                "title": "seconds",
                "scale": {"nice": False, "zero": False},
            },
            "x2": {"field": "end"},
            "color": {
                "field": "phase",
                "type": "nominal",
                "title": None,
                "scale": {"domain": used, "range": [PHASE_COLORS[phase] for phase in used]},
            },
            "tooltip": [
                {"field": "rank"},
                {"field": "phase"},
                {"field": "what"},
                {"field": "for", "title": "waited for rank"},
                {"field": "begin", "format": ".6f", "title": "begin (s)"},
                {"field": "ms", "format": ".3f", "title": "took (ms)"},
            ],
        },
    }


def _joined(spans: Sequence[Span], seconds: float) -> list[list[Span]]:
    """The spans in groups that become one bar each."""
    near = 0.0
    while True:
        groups: list[list[Span]] = []
        open_groups: dict[tuple[int, str], list[Span]] = {}
        for span in spans:
            key = (span.rank, span.phase)
            group = open_groups.get(key)
            if group is not None and near and span.begin - group[-1].end < near:
                group.append(span)
            else:
                open_groups[key] = [span]
                groups.append(open_groups[key])
        if len(groups) <= MOST_BARS:
            return groups
        near = near * 2 or seconds / 8000


def _bar(group: Sequence[Span]) -> dict[str, Any]:
    first, end = group[0], max(span.end for span in group)
    bar: dict[str, Any] = {
        "rank": first.rank,
        "phase": first.phase,
        "begin": round(first.begin, 6),
        "end": round(end, 6),
        "ms": round((end - first.begin) * 1000, 3),
        "what": first.what if len(group) == 1 else f"{len(group)} operations",
    }
    if len(group) == 1 and first.last not in (-1, first.rank):
        bar["for"] = first.last
    return bar
