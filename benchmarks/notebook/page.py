"""What a page of JupyterLab still does while ranks flood the notebook with rows.

    PYTHONPATH=tests .venv/bin/python benchmarks/notebook/page.py [--ranks 4] [--seconds 20] [--rate 10000]

A notebook in Chromium, with the panel of the run in sight: the gaps between the frames that the page draws, how long a
click on a widget takes to come back from the kernel, and how long a typed character takes to be in a cell. Three times:
with nothing running, with ranks that are as busy and log nothing, and with ranks that log ``rate`` rows a second each.

``--simulated 64 --rate 100`` shows the panel of so many ranks, for which a small machine has no cores: a thread of the
kernel hands the run the records that their engines would send, twice a second. All from there on is the real path.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import Page, sync_playwright

from browser.lab import Lab, NotebookPage
from browser.simulated import TRAINING

START = "%load_ext ring_notebook\n%ring start -n {ranks}"
WIDGET = """
import ipywidgets
count = ipywidgets.Label("0")
button = ipywidgets.Button(description="count")
button.on_click(lambda _: setattr(count, "value", str(int(count.value) + 1)))
ipywidgets.HBox([button, count])
"""
CELL = """%%ringtrain --background --name {name}
import time
logged, started = 0, time.perf_counter()
while (passed := time.perf_counter() - started) < 600:
    while logged < passed * {rate}:
        {body}
        logged += 1
    time.sleep(0.001)
"""
FEED = """
import threading

def feed(size, rate):
    step, begun = steps, time.perf_counter()
    while True:
        for rank in range(size):
            rows, load = array("d"), {{"cpu": 90 + 5 * math.sin(step + rank), "memory": 2 * 2**30}}
            for one in range(step, step + rate // 2):
                loss = 0.1 + math.exp(-one / 2000) + 0.02 * math.sin(one + rank)
                rows.extend((time.time(), one, loss, 1 - loss / 2, 1e-3, one // 100, 64))
            names = ("loss", "accuracy", "lr", "epoch", "samples")
            status = Status(log.run, rank, time.time(), line=4, progress=(one, 10**6), extra=facts(rank))
            records = [MetricBatch(log.run, rank, names, rows), status, Load(log.run, rank, time.time(), load)]
            log.put(encode(records))
        step += rate // 2
        time.sleep(max(0.0, begun + (step - steps) / rate - time.perf_counter()))

threading.Thread(target=feed, args=({size}, {rate}), daemon=True).start()
"""
LOGS, SILENT = "ring.log(loss=1 / (logged + 1), samples=1)", "sum(range(60))"
FRAMES = """seconds => new Promise(done => {
    const gaps = []; let last = performance.now(); const end = last + 1000 * seconds;
    const frame = now => { gaps.push(now - last); last = now; now < end ? requestAnimationFrame(frame) : done(gaps); };
    requestAnimationFrame(frame);
})"""


def drawn() -> float:
    """Seconds of a processor that Chromium's page has taken."""
    found = [one for one in psutil.Process().children(recursive=True) if "--type=renderer" in " ".join(one.cmdline())]
    return sum(sum(one.cpu_times()[:2]) for one in found)


def measure(page: Page, notebook: NotebookPage, seconds: float) -> str:
    """Frames, clicks and keys, one after the other."""
    before = drawn()
    gaps = sorted(page.evaluate(FRAMES, seconds))
    busy = (drawn() - before) / seconds
    label, button = notebook.output(1).locator(".widget-label"), notebook.output(1).get_by_role("button")
    clicks, keys = [], []
    for _ in range(20):
        before = label.inner_text()
        started = time.perf_counter()
        button.click()
        page.wait_for_function("([node, before]) => node.innerText !== before", arg=[label.element_handle(), before])
        clicks.append(1000 * (time.perf_counter() - started))
    editor = notebook.cell(4).locator(".cm-content")
    editor.click()
    for index in range(20):
        started = time.perf_counter()
        page.keyboard.type("x")
        page.wait_for_function(
            "([node, length]) => node.innerText.trim().length >= length", arg=[editor.element_handle(), index + 1]
        )
        keys.append(1000 * (time.perf_counter() - started))
    page.keyboard.press("Control+a")
    page.keyboard.press("Delete")
    return (
        f"{1000 * len(gaps) / sum(gaps):.0f} frames/s with {busy:.0%} of a core,"
        f" 99 % of gaps under {gaps[int(0.99 * len(gaps))]:.0f} ms,"
        f" longest {gaps[-1]:.0f} ms; click and back {statistics.median(clicks):.0f} ms (longest {max(clicks):.0f});"
        f" key {statistics.median(keys):.0f} ms (longest {max(keys):.0f})"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rate", type=int, default=10_000, help="rows a second on each rank")
    parser.add_argument("--simulated", type=int, default=0, metavar="N", help="the panel of N ranks that do not run")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="page-"))
    cells = [
        CELL.format(name=name, rate=options.rate, body=body) for name, body in (("silent", SILENT), ("logs", LOGS))
    ]
    shown = [(2, "ranks that compute"), (3, "ranks that log")]
    first = START.format(ranks=options.ranks)
    if options.simulated:
        first, shown = "%load_ext ring_notebook", [(2, f"{options.simulated} simulated")]
        values = {"size": options.simulated, "rate": options.rate, "run": "simulated", "name": "simulated"}
        cells[0] = (TRAINING + FEED).format(**values)
    NotebookPage.write(folder / "page.ipynb", first, WIDGET, *cells, "")
    with sync_playwright() as playwright:
        lab = Lab(folder, Path(tempfile.mkdtemp(prefix="page-")))
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 1500})
            notebook = NotebookPage(page, lab, "page.ipynb")
            for cell in range(2):
                notebook.run(cell)
                notebook.wait_ended(cell)
            print(f"nothing runs:       {measure(page, notebook, options.seconds)}", flush=True)
            for cell, name in shown:
                notebook.run(cell)
                notebook.output(cell).locator(".ring-panel").wait_for(timeout=60_000)
                page.wait_for_timeout(5000)
                print(f"{name + ':':19} {measure(page, notebook, options.seconds)}", flush=True)
                if not options.simulated:
                    notebook.output(cell).get_by_role("button", name="Stop").click()
                    notebook.output(cell).locator(".ring-report").wait_for(timeout=60_000)
            notebook.shut_down()
        finally:
            browser.close()
            lab.close()


if __name__ == "__main__":
    main()
