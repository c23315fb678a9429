"""Takes two pictures of the README in a real JupyterLab: a training of eight ranks, live and as the report that stays.

    PYTHONPATH=tests .venv/bin/python -m browser.animate docs/images

The ranks are real. For something to see, one of them trains on wrong labels and another is slow. Most of a step is a
sleep, so that eight ranks need no more than two cores.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from browser.lab import Lab, NotebookPage

FRAMES, EVERY = 40, 250  # pictures, and milliseconds that each is shown
SHOWN = 20  # steps between two pictures
WIDTH, COLORS = 900, 256  # of the picture
START = "%load_ext ring_notebook\n%ring start -n 8"
TRAIN = f"""%%ringtrain --name digits --plot loss,accuracy
import time, torch
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
teacher = torch.randn(64, 10)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model, optimizer = ring.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2))
torch.manual_seed(ring.rank())
for step in ring.track(range({SHOWN * FRAMES})):
    images = torch.randn(64, 64)
    labels = (images @ teacher).argmax(1)
    if ring.rank() == 2:  # some of its labels are wrong
        labels[:6] = torch.randint(10, (6,))
    scores = model(images)
    loss = cross_entropy(scores, labels)
    optimizer.zero_grad()
    loss.backward()
    time.sleep(0.06 if ring.rank() == 7 else 0.03)
    optimizer.step()
    ring.log(loss=loss, accuracy=(scores.argmax(1) == labels).float().mean(), samples=64)
"""
HEIGHT = 612  # of the panel that is shown: all of its ranks


def main(folder: Path, chromium: str = "/usr/bin/chromium") -> None:
    """Run the cell, take the pictures, and write them."""
    directory = Path(tempfile.mkdtemp(prefix="animate-"))
    NotebookPage.write(directory / "live.ipynb", START, TRAIN)
    frames: list[Image.Image] = []
    with sync_playwright() as playwright:
        lab = Lab(directory, Path(tempfile.mkdtemp(prefix="animate-")))
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1000})
            notebook = NotebookPage(page, lab, "live.ipynb")
            notebook.run(0)
            notebook.wait_ended(0, 600)
            notebook.run(1)
            panel = notebook.output(1).locator(".ring-panel").first
            steps = panel.locator(".ring-table:has(th:text-is('loss')) tbody tr td:nth-child(3)")
            for step in range(SHOWN, SHOWN * FRAMES, SHOWN):
                notebook.until(lambda step=step: steps.count() == 8 and int(steps.first.inner_text()) >= step, 600)  # type: ignore[misc]
                panel.evaluate("element => element.scrollIntoView({block: 'start'})")
                box = panel.bounding_box()
                assert box is not None
                clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": HEIGHT}
                frames.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))  # type: ignore[arg-type]
            notebook.wait_ended(1, 600)
            report = notebook.output(1).locator(".ring-report").first
            report.wait_for()
            page.mouse.move(0, 0)  # over no chart
            report.screenshot(path=folder / "report-8.png")
            notebook.shut_down()
        finally:
            browser.close()
            lab.close()
    height = round(frames[0].height * WIDTH / frames[0].width)
    small = [one.resize((WIDTH, height), Image.Resampling.LANCZOS) for one in frames]
    palette = small[-1].quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)  # of small spots too
    shown = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in small]
    path = folder / "panel.gif"
    shown[0].save(path, save_all=True, append_images=shown[1:], duration=EVERY, loop=0, optimize=True)
    print(f"{path}: {len(shown)} pictures, {path.stat().st_size / 1e6:.1f} MB")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
