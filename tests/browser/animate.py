"""Takes the animated picture of the README: a training on eight simulated ranks, half a second a picture.

    PYTHONPATH=tests .venv/bin/python -m browser.animate docs/images/panel.gif

The panel is the real one in a real JupyterLab; only the records of its ranks are made up (`simulated.LIVE`), because
eight ranks want eight cores.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from browser.lab import Lab, NotebookPage
from browser.simulated import LIVE

FRAMES, EVERY = 40, 250  # pictures, and milliseconds that each is shown
WIDTH, COLORS = 900, 256  # of the picture


def main(path: Path, chromium: str = "/usr/bin/chromium") -> None:
    """Run the cell, take the pictures, and write them as one."""
    folder = Path(tempfile.mkdtemp(prefix="animate-"))
    NotebookPage.write(folder / "live.ipynb", LIVE.format(size=8, run="live", name="digits"))
    frames = []
    with sync_playwright() as playwright:
        lab = Lab(folder, Path(tempfile.mkdtemp(prefix="animate-")))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1000})
            notebook = NotebookPage(page, lab, "live.ipynb")
            notebook.run(0)
            panel = notebook.output(0).locator(".ring-panel").first
            for tick in range(1, FRAMES + 3):
                (folder / "tick").write_text(str(tick))
                page.wait_for_timeout(700)  # two redraws
                if tick < 3:
                    continue  # a point is no curve yet
                panel.evaluate("element => element.scrollIntoView({block: 'start'})")
                box = panel.bounding_box()
                assert box is not None
                clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": 516}
                frames.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
            notebook.shut_down()
        finally:
            browser.close()
            lab.close()
    height = round(frames[0].height * WIDTH / frames[0].width)
    small = [one.resize((WIDTH, height), Image.Resampling.LANCZOS) for one in frames]
    palette = small[-1].quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)  # of small spots too
    shown = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in small]
    shown[0].save(path, save_all=True, append_images=shown[1:], duration=EVERY, loop=0, optimize=True)
    print(f"{path}: {len(shown)} pictures, {path.stat().st_size / 1e6:.1f} MB")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
