"""A classroom of 40: how far behind the tiles are, and what they cost the instructor's kernel.

    python benchmarks/notebook/classroom.py [--attendees 40] [--seconds 20]

40 notebooks share a run each into one folder: their logs grow ten times a second, in this process. A kernel shows them
with `%ring classroom`. Each second one rank fails; "behind" is the time until the kernel has sent tiles that
say so. "core" is the kernel's processor time over the time that passed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from threading import Event, Thread

import nbformat
import psutil
from nbclient import NotebookClient

from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.run.sharing import Sharing
from ring_notebook.protocol.records import Failure, MetricBatch, encode


def attend(folder: Path, number: int) -> tuple[RunLog, Sharing]:
    """One attendee's run, shared."""
    name = f"1-attendee-{number}"
    log = RunLog(folder / "runs" / name, name, f"attendee-{number}", 2, "print(1)\n", {}, {})
    sharing = Sharing(lambda: log)
    room = folder / "rooms" / str(number)  # a file is called after its user, host and process
    room.mkdir(parents=True)
    sharing.begin(str(room), f"attendee-{number}")
    return log, sharing


async def watch(folder: Path, attendees: int, seconds: float) -> None:
    """Show the tiles in a kernel; print how far behind they are and what they cost."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=60, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    await client.async_start_new_kernel()
    await client.async_start_new_kernel_client()
    kernel = psutil.Process(client.km.provisioner.pid)
    joined = [attend(folder, number) for number in range(attendees)]
    rooms = " ".join(str(folder / "rooms" / str(number)) for number in range(attendees))
    ended = Event()

    def log_on() -> None:
        step = 0
        while not ended.wait(0.1):
            step += 1
            for log, _ in joined:
                row = array("d", [time.time(), step, 1 / step])
                log.put(encode([MetricBatch(log.run, 0, ("loss",), row)]))

    Thread(target=log_on, daemon=True).start()
    client.kc.execute(f"%load_ext ring_notebook\n%ring classroom {rooms}")
    await asyncio.sleep(5)
    behind: list[float] = []
    spent, begun = sum(kernel.cpu_times()[:2]), time.monotonic()
    for turn in range(int(seconds)):
        log, _ = joined[turn % attendees]
        text = f"arranged failure {turn}"
        at = time.monotonic()
        log.put(encode([Failure(log.run, 1, "ValueError", "builtins", text, (), "Traceback")]))
        while time.monotonic() < at + 20:
            message = await client.kc.get_iopub_msg(timeout=20)
            if text in str(message["content"].get("data", {}).get("text/html", "")):
                break
        behind.append(time.monotonic() - at)
        await asyncio.sleep(max(0.0, 1 - behind[-1]))
    passed = time.monotonic() - begun
    share = (sum(kernel.cpu_times()[:2]) - spent) / passed
    print(f"{attendees} attendees, {len(behind)} changes")
    print(f"behind: median {statistics.median(behind):.2f} s, most {max(behind):.2f} s")
    print(f"instructor's kernel: {share:.1%} of a core")
    ended.set()
    for log, sharing in joined:
        sharing.end()
        log.close()
    await client._async_cleanup_kernel()


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attendees", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(watch(Path(folder), given.attendees, given.seconds))


if __name__ == "__main__":
    main()
