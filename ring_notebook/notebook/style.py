"""Formats of numbers and times, and the style sheet: the same in the panel, the report and the terminal."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float) -> str:
    """A metric in four significant digits; a large one without decimals, with commas."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def shown(value: object) -> str:
    """A value of a knob or hyper-parameter."""
    return number(value) if isinstance(value, float) else str(value)


def whole(value: float) -> str:
    """A count or a rate without decimals, with commas; a small one keeps two digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ago(seconds: float) -> str:
    """``now`` or ``12 s ago``."""
    return "now" if seconds < 2 else f"{duration(seconds)} ago"


def sparkline(values: Sequence[float], width: int = 80, height: int = 16) -> str:
    """A curve as a small picture of so many pixels, with gaps where values are not finite; empty for under two."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    step = (width - 4) / (len(values) - 1)
    path, pen = "", "M"
    for index, value in enumerate(values):
        if math.isfinite(value):
            path += f"{pen}{2 + index * step:.1f} {height - 2 - (value - low) / span * (height - 4):.1f}"
        pen = "L" if math.isfinite(value) else "M"
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}'>"
        f"<path d='{path}' fill='none' stroke='#3b82f6' stroke-width='1.5'/></svg>"
    )
    source = f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
    return f"<img alt='' width='{width}' height='{height}' style='vertical-align:middle' src='{source}'>"


def blocks(values: Iterable[float], low: float, high: float) -> str:
    """A curve for a terminal, a character for each value between ``low`` and ``high``; blank where it is not finite."""
    scale = (len(_BLOCKS) - 1) / ((high - low) or 1.0)
    heights = (scale * (min(max(one, low), high) - low) if math.isfinite(one) else -1 for one in values)
    return "".join([_BLOCKS[round(one)] if one >= 0 else " " for one in heights])


def duration(seconds: float) -> str:
    """Seconds as text: ``0.4 s``, ``12 s``, ``3:05``, ``2:03:05``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def with_code(text: str) -> str:
    """A text for a page, with code between backquotes."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


# For panel and report. Colors of the page come first, so that both follow its theme.
CSS = """<style>
.ring-panel, .ring-report, .ring-last { border: 1px solid var(--jp-border-color2, #8885); border-radius: 8px;
  padding: 10px 14px; margin: 2px 0; color: var(--jp-ui-font-color1, inherit); font-size: 13px; }
.ring-head { display: flex; gap: 2px 0; align-items: baseline; flex-wrap: wrap; line-height: 1.6;
  margin-left: -14px; clip-path: inset(0 0 0 14px); }
.ring-head > * { padding-left: 14px; white-space: nowrap; }
.ring-head b, .ring-status { font-size: 14px; font-weight: 600; }
.ring-dot { display: inline-block; width: 14px; margin-left: -14px; text-align: center; color: #8791a0; }
.ring-alarm { font-weight: 600; line-height: 1.5; margin-bottom: 4px; }
.ring-params { color: #8791a0; font-size: 12px; overflow: hidden; text-overflow: ellipsis; }
.ring-begin { padding: 10px 0 0 2px; line-height: 1.6; color: var(--jp-ui-font-color2, #666);
  font-family: var(--jp-code-font-family, monospace); font-size: 12px; }
.ring-stage > * { grid-area: 1 / 1; min-width: 0; }
.ring-stage:has(canvas) > :first-child { display: none; }
.ring-panel .ring-toggle, .ring-panel .jupyter-button { line-height: 22px; padding: 0 8px; border-radius: 4px;
  font-size: 12px; }
.ring-choices .widget-text input { height: 24px; }
/* The arrow of ipywidgets is black on dark pages too. */
.ring-panel .widget-dropdown > select { background-image: url("data:image/svg+xml,%3Csvg viewBox='0 0 18 18' \
xmlns='http://www.w3.org/2000/svg' fill='none' stroke='%238791a0' stroke-width='2'%3E%3Cpath d='M5 7l4 4 4-4'/%3E\
%3C/svg%3E"); }
.ring-choices .widget-readout { min-width: 34px; width: 34px; margin: 0; text-align: right; }
.ring-alarm code { font-weight: 400; color: inherit !important; background: none !important; }
.ring-pixels img { image-rendering: pixelated; }
.ring-bar { display: inline-block; width: clamp(44px, 22vw - 130px, 140px); height: 6px; border-radius: 3px;
  margin-right: 8px; background: var(--jp-border-color2, #8885); vertical-align: middle; }
.ring-bar i { display: block; height: 100%; border-radius: 3px; background: #3b82f6;
  transition: width .3s; }
.ring-table { border-collapse: collapse; font-size: 12px; line-height: 1.5; margin: 4px 0; border: none;
  font-variant-numeric: tabular-nums; }
.ring-table th { position: sticky; top: 0; background: var(--jp-layout-color0, transparent);
  font-weight: 600; }
.ring-table th, .ring-table td { text-align: right; padding: 1px 9px 1px 0; white-space: nowrap;
  border: none; }
.ring-table th:nth-child(-n+2), .ring-table td:nth-child(-n+2) { text-align: left; }
.ring-report .ring-table { font-size: 12px; }
.ring-table .ring-slow { color: #d97706; font-weight: 600; }
.ring-time { display: flex; width: 100%; min-width: 120px; height: 14px; border-radius: 2px; overflow: hidden;
  background: var(--jp-border-color2, #8885); }
.ring-time i { min-width: 0; overflow: hidden; text-align: center; color: #111827;
  font: 600 10px/14px system-ui, sans-serif; }
.ring-time i:first-child { color: #fff; }
.ring-table th.ring-legend { font-size: 10px; font-weight: 400; }
.ring-table caption { font-size: 10px; text-align: left; padding: 0 0 2px; color: inherit; }
.ring-fit { container-type: inline-size; }
.ring-lines, .ring-lines .widget-html-content { font: 12px/1.45 var(--jp-code-font-family, monospace);
  white-space: pre-wrap; overflow-wrap: anywhere; min-height: 0; height: auto; }
.ring-notice { border-left: 3px solid #f59e0b; padding: 2px 0 2px 10px; margin: 6px 0; line-height: 1.5; }
.ring-load span { margin-right: 4px; color: #8791a0; font-size: 9px; letter-spacing: -1px; opacity: .5; }
.ring-stuck th, .ring-stuck td { text-align: left !important; vertical-align: top; }
.ring-stuck td:nth-child(3n+2) { white-space: normal !important; }
.ring-stuck { border-color: #ef4444; }
.ring-alert { border-color: #ef4444; color: #ef4444; }
.ring-hint { border-color: #3b82f6; }
.ring-gone { display: none; }
.ring-panel.jupyter-widgets-disconnected .ring-gone { display: block; }
.ring-panel.jupyter-widgets-disconnected .jupyter-button, .ring-panel.jupyter-widgets-disconnected .ring-choices,
  .ring-panel.jupyter-widgets-disconnected .ring-bar { display: none; }
.ring-panel.jupyter-widgets-disconnected tbody td:nth-child(2), .ring-last tbody td:nth-child(2) {
  visibility: hidden; }
.ring-panel.jupyter-widgets-disconnected .ring-status { font-size: 0; }
.ring-panel.jupyter-widgets-disconnected .ring-status::after { content: "● last state seen"; font-size: 14px;
  color: #8791a0; }
.ring-panel.jupyter-widgets-disconnected::before, .ring-panel .jupyter-widgets-disconnected::before {
  content: none !important; }
.ring-folded { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 0 24px;
  padding-left: 14px; }
.ring-folded details { min-width: 0; }
.ring-folded summary { color: #8791a0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.ring-report summary { cursor: pointer; margin-top: 4px; }
.ring-rows { max-height: 260px; overflow: auto; }
@container (max-width: 1100px) { .ring-table tr th, .ring-table tr td { padding-right: 8px; }
  .ring-load span { display: none; } }
@container (max-width: 760px) { .ring-time { min-width: 84px; }
  .ring-table .ring-legend span, .ring-time i { font-size: 0; }
  .ring-legend::after { content: "time"; font-size: 12px; font-weight: 600; }
  .ring-table caption { display: table-caption !important; }
  .ring-table tr th, .ring-table tr td { padding-right: 7px; } }
@container (max-width: 600px) { .ring-time { min-width: 56px; }
  .ring-fit .ring-table { width: 100%; table-layout: auto; }
  .ring-table tr th, .ring-table tr td { padding-right: 5px; } }
</style>"""
