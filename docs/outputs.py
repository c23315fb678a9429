"""What the notebooks have shown, for the site: `make outputs` runs and checks them, and keeps it.

The notebooks are saved without outputs, so that a reader runs them. The site has no kernel: there each cell shows what
it showed here, which `docs/outputs/NAME.json` holds by the hash of the code up to and with the cell.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "notebooks" / "gallery").glob("*.ipynb")])
BIN = Path(sys.executable).parent  # a script for a batch job names it
VEGA = "application/vnd.vegalite.v5+json"
DRAW = """
document.querySelectorAll(".vega-chart:has(> script)").forEach(place => {
  const spec = JSON.parse(place.firstChild.textContent);
  place.firstChild.remove();  // the page names this file once for each chart
  vegaEmbed(place, spec, {actions: false});
});
"""


def kept(notebook: Path) -> Path:
    """Where the outputs of a notebook lie."""
    return ROOT / "docs" / "outputs" / f"{notebook.stem}.json"


def hashes(notebook: dict[str, Any]) -> list[str]:
    """For each code cell, of all code that has run when it ends."""
    running, found = hashlib.sha256(), []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            running.update("".join(cell["source"]).encode() + b"\0")
            found.append(running.hexdigest()[:16])
    return found


def stale() -> list[str]:
    """The notebooks whose code has changed since their outputs were kept."""
    return [
        path.name
        for path in NOTEBOOKS
        if kept(path).exists() and set(json.loads(kept(path).read_text())) != set(hashes(json.loads(path.read_text())))
    ]


def add(_app: object, page: str, source: list[str]) -> None:
    """Put the outputs into a notebook that Sphinx reads; those of code that has changed since are left out."""
    path = ROOT / f"{page}.ipynb"
    if path not in NOTEBOOKS or not kept(path).exists():
        return
    notebook, outputs = json.loads(source[0]), json.loads(kept(path).read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, name in zip(code, hashes(notebook), strict=True):
        cell["outputs"] = [drawn(output) for output in outputs.get(name, [])]
    source[0] = json.dumps(notebook)


def drawn(output: dict[str, Any]) -> dict[str, Any]:
    """An output as Sphinx can show it; a chart of Vega-Lite as a page that `vega.js` draws."""
    if not (spec := output.get("data", {}).get(VEGA)):
        return output
    text = json.dumps(spec).replace("</", "<\\/")
    page = f'<div class="vega-chart"><script type="application/json">{text}</script></div>'
    return output | {"data": {"text/html": f'{page}<script src="../_static/vega.js" defer></script>'}}


def write_vega(folder: Path) -> None:
    """Write `vega.js`, which is in PyPI's vl-convert-python, for `drawn`."""
    import vl_convert

    if not (folder / "vega.js").exists():
        bundle = vl_convert.javascript_bundle(DRAW, vl_version="5.20")
        (folder / "vega.js").write_text(f"(() => {{{bundle}}})();")


def keep(path: Path, outputs: Sequence[Any], folder: Path) -> None:
    """Keep the outputs of a notebook's code cells, which were executed in ``folder``."""
    names = hashes(json.loads(path.read_text()))
    kept(path).parent.mkdir(exist_ok=True)
    lines = [
        f"{json.dumps(name)}: {json.dumps(shown, sort_keys=True)}" for name, shown in zip(names, outputs, strict=True)
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    kept(path).write_text(text.replace(f"{folder}/", "").replace(f"{BIN}/", ""))
