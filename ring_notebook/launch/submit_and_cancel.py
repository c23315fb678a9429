"""Submits a batch job for a process, and cancels it when that process has ended, however it ended.

``python -m ring_notebook.launch.submit_and_cancel PARENT SYSTEM FOLDER KEEP``. The script is ``job.sh`` in FOLDER,
where the file ``job`` gets the number of the job. Prints the number, or why the job was rejected. Cancels the job when
standard input or PARENT ends, unless KEEP is 1.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from ring_notebook.files.private_files import replace_text
from ring_notebook.launch.batch_commands import SYSTEMS, BatchError
from ring_notebook.machine.os_calls import exit_descriptor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TRIES, _PERIOD = 60, 5.0  # a batch system may not answer for some minutes


def main() -> None:
    """Entry point; exits with 1 when the job is rejected."""
    parent, system, folder, keep = int(sys.argv[1]), SYSTEMS[sys.argv[2]], Path(sys.argv[3]), sys.argv[4] == "1"
    # A signal during the submission would leave a job whose number nobody knows.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    for signum in _SIGNALS:
        signal.signal(signum, lambda *_: os.write(wake, b"."))
    try:
        job = system.submit_script(str(folder / "job.sh"))
    except BatchError as error:
        _tell(str(error))
        sys.exit(1)
    with contextlib.suppress(OSError):  # without the file nobody can attach to the job, and it is not kept
        replace_text(folder / "job", job)
        if keep:
            _tell(job)
            return
    _tell(job)
    with contextlib.suppress(ProcessLookupError):
        if os.getppid() == parent:
            select.select([0, woken, exit_descriptor(parent)], [], [])
    for _ in range(_TRIES):
        if system.end(job):
            return
        time.sleep(_PERIOD)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the parent has ended
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main()
