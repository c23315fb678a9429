"""Charts for a page without widgets: images that fill the width, with values to hover over, and to be zoomed.

To zoom is to make an image wider in a frame that scrolls. Where the page keeps our style sheet, a click does it, on an
element that is open or closed. A page that removes the sheet, because it does not trust the notebook, keeps the styles
of elements, so that a reader can drag the corner of a chart. Neither needs a script or a kernel.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from ring_notebook.notebook.panel.charts.chart import Chart, columns
from ring_notebook.notebook.panel.charts.svg_chart import BOTTOM, HEIGHT, RIGHT, TOP, labels, svg, tips
from ring_notebook.notebook.style import GREY

__all__ = ["CSS", "ZOOM", "grid"]

ZOOM = 500  # percent of the frame that a chart fills when it is zoomed
_ZOOM = (
    "<details class='ring-zoom'><summary>zoom</summary>"
    "<div>Drag the lower right corner of the chart, then scroll.</div></details>"
)

# The values lie in attributes of empty elements, so that nothing of them is seen where a page removes styles.
CSS = f"""<style>
.ring-charts {{ display: grid; gap: 8px 24px; margin: 6px 0; }}
.ring-chart {{ position: relative; min-width: 0; }}
.ring-wide img {{ display: block; width: 100%; height: {HEIGHT}px; max-width: none; }}
.ring-zoom {{ position: absolute; right: 0; bottom: 0; z-index: 6; font-size: 11px; color: {GREY}; }}
.ring-chart .ring-zoom summary {{ list-style: none; margin: 0; padding: 0 2px; line-height: 11px; }}
.ring-zoom summary:hover {{ color: var(--jp-ui-font-color1, inherit); }}
.ring-zoom div {{ display: none; }}
.ring-zoom[open] {{ top: 0; bottom: auto; background: var(--jp-layout-color0, Canvas); }}
.ring-zoom[open] summary {{ font-size: 0; }}
.ring-zoom[open] summary::after {{ content: "show all"; font-size: 11px; }}
.ring-wide {{ resize: none !important; overflow: visible !important; }}
.ring-frame {{ overflow: visible !important; }}
.ring-zoom[open] ~ div .ring-frame {{ overflow: auto hidden !important; }}
.ring-zoom[open] ~ div .ring-wide {{ width: {ZOOM}% !important; }}
.ring-tips {{ position: absolute; left: 0; right: {RIGHT}%; top: {TOP}px; bottom: {BOTTOM}px; display: flex; }}
.ring-tips i {{ flex: 1; position: relative; font-style: normal; }}
.ring-tips i:hover::before {{ content: ""; position: absolute; left: 50%; top: 0; bottom: 0;
  border-left: 1px solid #8791a0; }}
.ring-tips i:hover::after {{ content: attr(data-tip); position: absolute; left: calc(50% + 8px); top: 6px; z-index: 5;
  white-space: pre; font: 11px/1.5 system-ui, sans-serif; padding: 4px 8px; border-radius: 4px; pointer-events: none;
  color: var(--jp-ui-font-color1, #222); background: var(--jp-layout-color1, #fff);
  box-shadow: 0 1px 6px #0005; font-variant-numeric: tabular-nums; }}
.ring-tips i:nth-child(n+31):hover::after {{ left: auto; right: calc(50% + 8px); }}
</style>"""


def grid(charts: Sequence[Chart]) -> str:
    """The charts side by side, as many in a row as there is room for; empty without one."""
    if not charts:
        return ""
    shown = "".join(
        f"<div class='ring-chart'>{_ZOOM}<div style='display:flex'>{_labels(one)}"
        "<div class='ring-frame' style='overflow-x:auto;flex:1;min-width:0'>"
        "<div class='ring-wide' style='position:relative;resize:horizontal;overflow:hidden'>"
        f"{_image(one)}<div class='ring-tips'>{tips(one)}</div></div></div></div></div>"
        for one in charts
    )
    return f"<div class='ring-charts' style='grid-template-columns:{columns(len(charts))}'>{shown}</div>"


def _image(chart: Chart) -> str:
    about = escape(f"{chart.title} over {chart.xlabel}: {chart.note}", quote=True)
    return f"<img alt='{about}' width='100%' height='{HEIGHT}' src='{_address(svg(chart))}'>"


def _labels(chart: Chart) -> str:
    image, width = labels(chart)
    style = f"width:{width}px;height:{HEIGHT}px;flex:none"
    return f"<img class='ring-axis' alt='' style='{style}' src='{_address(image)}'>"


def _address(image: str) -> str:
    # As an image: front ends remove inline SVG from notebooks that are not trusted.
    return f"data:image/svg+xml;base64,{base64.b64encode(image.encode()).decode()}"
