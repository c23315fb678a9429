"""One job: mpiexec or a keeper under our control, signals handed on, and the rank that failed first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import BinaryIO, TextIO

from ring_notebook.launch import keeper
from ring_notebook.launch.deathsig import wrap
from ring_notebook.launch.hosts import Host
from ring_notebook.launch.mpi import find_mpiexec
from ring_notebook.launch.rank import RankFailure, describe_exit, split_reports
from ring_notebook.launch.traces import Traces

__all__ = ["Job"]

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves, with errors of their own, after one has failed."""


class Job:
    """``program`` on ``n`` ranks. It ends when this process does, however this process ends.

    What the ranks print goes to ``sys.stdout`` and ``sys.stderr`` as they are when the job starts, which in a
    notebook are the cell's. All of ``env`` reaches the ranks of all hosts. With ``min_np`` the job is elastic: it goes
    on as long as so many ranks do, which has to be on this host. Raises MPIMissingError and ValueError as
    `find_mpiexec` and `Mpiexec.command` do.
    """

    def __init__(
        self,
        program: Sequence[str],
        n: int,
        hosts: Sequence[Host] = (),
        env: Mapping[str, str] | None = None,
        mpi_args: Sequence[str] = (),
        stdin: int | None = None,
        min_np: int = 0,
    ) -> None:
        needed: Mapping[str, str] = {}
        if min_np:
            self.command = keeper.command(program, n, min_np)
        else:
            mpiexec = find_mpiexec()
            supervised = [sys.executable, "-m", "ring_notebook.launch.rank", *program]
            self.command = mpiexec.command(n, supervised, hosts, mpi_args, env or ())
            needed = mpiexec.environment()
        self._elastic = min_np > 0
        self.failures: list[RankFailure] = []
        self.ended_by = 0
        environment = {**os.environ, **needed, **(env or {})}
        self._traces = Traces(environment, n)
        self._process = subprocess.Popen(
            wrap(self.command),
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A session of its own: the terminal's Ctrl-C comes once, through us, and not twice.
            start_new_session=True,
        )
        self._pumps = [
            threading.Thread(target=self._pump, args=(source, sink), name="ring-job-output", daemon=True)
            for source, sink in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        ]
        self._stopper: threading.Timer | None = None
        for pump in self._pumps:
            pump.start()

    def send(self, signum: int) -> None:
        """Hand a signal to mpiexec or the keeper, which hands it to the ranks."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def kill(self) -> None:
        """End all ranks now."""
        self.send(signal.SIGTERM)
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            # Ranks on this host that ignore SIGTERM lose their process manager, and with it their lives.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> int:
        """Wait for the job; its exit code is the first failed rank's, and 128 + signal where one ended it.

        0 for an elastic job that went on to its end without the ranks that failed.

        The file that ``RING_TIMELINE`` names is written then. When the wait is interrupted the job is killed.
        """
        try:
            code = self._process.wait()
        except BaseException:
            self.kill()
            raise
        finally:
            if self._stopper is not None:
                self._stopper.cancel()
        for pump in self._pumps:
            pump.join()
        if said := self._traces.merge():
            print(f"ringrun: {said}", file=sys.stderr, flush=True)  # noqa: T201
        first = self.first_failure
        if self.ended_by:
            code = -self.ended_by
        elif first is not None and not self._elastic:
            code = first.code
        return code if code >= 0 else 128 - code

    @property
    def first_failure(self) -> RankFailure | None:
        """The rank that ended badly before any other did; None when none has."""
        return min(self.failures, key=lambda failure: failure.time, default=None)

    def describe_failure(self) -> str:
        """One sentence on the rank that failed first, or on what started the ranks when no rank did."""
        first = self.first_failure
        if first is None:
            launcher = "the keeper of the ranks" if self._elastic else "mpiexec"
            return f"{launcher} failed ({describe_exit(self._process.returncode)}): {' '.join(self.command)}"
        return f"rank {first.rank} on {first.host} failed first: {describe_exit(first.code)}"

    def _pump(self, source: BinaryIO, sink: TextIO) -> None:
        kept = b""
        with source:
            while data := source.read1(65536):  # type: ignore[attr-defined]
                text, failures, kept = split_reports(kept + data)
                _write(sink, text)
                self._note(failures)
        _write(sink, kept)

    def _note(self, failures: list[RankFailure]) -> None:
        if failures and self._stopper is None and not self._elastic:
            self._stopper = threading.Timer(GRACE, self.send, (signal.SIGTERM,))
            self._stopper.daemon = True
            self._stopper.start()
        self.failures += failures

    @contextlib.contextmanager
    def signals_handed_on(self) -> Iterator[None]:
        """While the block runs, what would end this process ends the job instead (command line only)."""
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

        def hand_on(signum: int, _frame: FrameType | None) -> None:
            if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self.ended_by = signum
            self.send(signum)

        before = {signum: signal.signal(signum, hand_on) for signum in wanted}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _write(sink: TextIO, data: bytes) -> None:
    """Bytes to a text stream, as they are where it has a binary side."""
    if not data:
        return
    sink.flush()
    binary = getattr(sink, "buffer", None)
    if binary is not None:
        binary.write(data)
    else:
        sink.write(data.decode(errors="replace"))
    sink.flush()
