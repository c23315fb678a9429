"""Names that not all ranks start: reported where they wait for long, and every way that such a wait ends."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.waiting import stderr_into, until
from native.names import LATE, ends, start, total, waits_for
from native.ranks import Dead, Seat, as_processes, as_threads, on_ranks
from ring_notebook.core.communicator import Communicator
from ring_notebook.errors import CollectiveAborted, CollectiveTimeout


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("place", [(), (0, 1, 1)])
def test_abort(place: tuple[int, ...], known: bool) -> None:
    """The reason reaches who waits for a name that others have not started, in a round and after one."""
    started: list[Communicator] = []

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        if known:
            start(ring, "before", 1.0)[1].wait()
        if seat.rank == 1:
            if known:
                start(ring, "of rank 1 alone", 1.0)
            until(lambda: len(started) == 2 and all(waits_for(other, "x") for other in started))
            ring.abort("rank 1 raised ValueError: bad")
        else:
            _, work = start(ring, "x", 1.0)
            started.append(ring)
            ends(work.wait, CollectiveAborted, f"rank {seat.rank}: allreduce 'x' stopped because rank 1 raised")
        ends(lambda: start(ring, "y", 1.0)[1].wait(), CollectiveAborted, "rank 1 raised ValueError: bad")
        total(seat.open(2))

    as_threads(3, body, hosts=place)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("place", [(), (0, 1, 1), (0, 0, 1)])
def test_a_rank_that_leaves(place: tuple[int, ...], in_group: bool, known: bool) -> None:
    """Who waits for its name learns that it has left, whether it has ever started one or not."""
    started: list[Communicator] = []

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        group = ring.group([2, 1, 0]) if in_group else ring
        assert group is not None
        if known:
            start(group, "before", 1.0)[1].wait()
        if seat.rank == 2:
            until(lambda: len(started) == 2 and all(waits_for(other, "x") for other in started))
            group.close()
            ring.close()
        else:
            _, work = start(group, "x", 1.0)
            started.append(group)
            ends(work.wait, CollectiveAborted, r"ranks? 2.* left \(.*cells? or scripts? ended\)")
        total(seat.open(2))

    as_threads(3, body, hosts=place)


@pytest.mark.parametrize("place", [(), (0, 1, 1)])
def test_closing_with_names_that_nobody_else_starts(place: tuple[int, ...]) -> None:
    """Ranks that close while each waits for a name of its own end the generation instead of waiting for one another."""

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        _, work = start(ring, f"of rank {seat.rank}", 1.0)
        ring.close()
        ends(work.wait, CollectiveAborted, r"has left \(its cell or script ended\)")
        total(seat.open(2))

    as_threads(3, body, hosts=place)


def test_closing_waits_for_names_that_come() -> None:
    """As for any queued operation."""
    closing = threading.Semaphore(0)

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        if seat.rank == 0:
            for _ in range(2):
                assert closing.acquire(timeout=LATE)
        tensor, work = start(ring, "x", 1.0)
        closing.release()
        ring.close()
        assert work.done()
        assert tensor.values.tolist() == [3.0] * 3

    as_threads(3, body)


@pytest.mark.parametrize("known", [False, True])
@on_ranks(3, as_processes, gives=["told", Dead(9), "told"])
def test_a_rank_that_dies(seat: Seat, known: bool) -> str:
    """Who waits for its name learns of its death."""
    ring = seat.open(1)
    if known:
        start(ring, "before", 1.0)[1].wait()
    if seat.rank == 1:
        ring.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    _, work = start(ring, "x", 1.0)
    ring.barrier()
    ends(work.wait, CollectiveAborted, "rank 1 .*has died")
    return "told"


@pytest.mark.parametrize("place", [(), (0, 1)])
def test_deadline(place: tuple[int, ...], settings: Callable[..., None]) -> None:
    """Past RING_TIMEOUT the error says which ranks have not started the name."""
    settings(timeout=0.3)
    timed_out = threading.Event()

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        if seat.rank == 0:
            _, work = start(ring, "x", 1.0)
            ends(
                work.wait, CollectiveTimeout, r"allreduce 'x' timed out: rank 1 has not started it\. Start it on every"
            )
            timed_out.set()
        else:
            assert timed_out.wait(LATE)
            ends(ring.barrier, CollectiveAborted, "allreduce 'x' timed out")

    as_threads(2, body, hosts=place)


@on_ranks(2)
def test_dropped_while_under_way(seat: Seat) -> None:
    """A communicator that is dropped while a name waits ends the generation instead of leaving others waiting."""
    ring = seat.open(1)
    if seat.rank == 0:
        start(ring, "before", 1.0)[1].wait()
        start(ring, "x", 1.0)
        seat.opened.clear()
        del ring
        gc.collect()
    else:
        # The first one too, where its result had not arrived yet.
        names = ("before", "y")
        ends(lambda: [start(ring, n, 1.0)[1].wait() for n in names], CollectiveAborted, "rank 0 dropped")
    total(seat.open(2))


@pytest.mark.parametrize("known", [False, True])
def test_a_name_that_a_rank_does_not_start_is_reported(known: bool, tmp_path: Path) -> None:
    """On standard error, by one rank, once for a name, with the ranks that are missing."""
    started, reported = threading.Event(), threading.Event()
    said = tmp_path / "said"

    def body(seat: Seat) -> None:
        ring = seat.open(1, stall_warning=0.5)
        if known:
            start(ring, "before", 1.0)[1].wait()
        for time_round in range(2):
            if seat.rank in (0, 2):
                if seat.rank == 0:
                    assert started.wait(LATE)
                _, work = start(ring, "layer 3", 1.0)
                started.set()
                if seat.rank == 0 and time_round == 0:
                    shown = {"rank": 0, "state": "waiting", "operation": "allreduce", "name": "layer 3"}
                    shown |= {"missing": [1, 3]}  # as the panel sees it
                    until(lambda shown=shown: any(shown.items() <= entry.items() for entry in ring.snapshot()))
                    until(lambda: "[ring]" in said.read_text())
                    reported.set()
            else:
                assert reported.wait(LATE)
                _, work = start(ring, "layer 3", 1.0)
            work.wait()

    with stderr_into(said):
        as_threads(4, body)
    lines = [line for line in said.read_text().splitlines() if line.startswith("[ring]")]
    assert len(lines) == 1
    assert re.fullmatch(
        r"\[ring\] rank 0: allreduce 'layer 3' has waited \d\.\d s: ranks 1, 3 have not started it", lines[0]
    )


@pytest.mark.parametrize(
    ("hosts", "silent", "waits"),
    [
        (
            (0, 0, 1, 1, 2),
            [3],
            {0: "the host of ranks 2-3 has", 2: "rank 3 has not called it", 4: "the host of ranks 2-3"},
        ),
        ((0, 0, 1, 2, 2, 3), [2, 3, 4], {0: "hosts of ranks 2-4 have", 5: "hosts of ranks 2-4 have"}),
        (
            tuple(range(13)),
            [1],
            {0: "the host of rank 1 has", 12: "hosts of ranks 1-2 have", 10: "hosts of ranks 1-4 have"},
        ),
    ],
)
def test_the_host_that_is_silent_is_named(
    hosts: tuple[int, ...], silent: list[int], waits: dict[int, str], tmp_path: Path
) -> None:
    """By one rank of each host that waits; many hosts pass on what they have got, and know only who is among them."""
    said = tmp_path / "said"

    def lines() -> list[str]:
        return [line for line in said.read_text().splitlines() if line.startswith("[ring]")]

    def body(seat: Seat) -> None:
        ring = seat.open(1, stall_warning=0.5)
        ring.barrier()
        if seat.rank in silent:
            until(lambda: all(any(f"rank {rank}: barrier" in line for line in lines()) for rank in waits))
            time.sleep(0.3)  # another rank of a host could say something too
        ring.barrier()

    with stderr_into(said):
        as_threads(len(hosts), body, hosts=hosts)
    found = {int(line.split()[2].rstrip(":")): line for line in lines()}
    assert len(found) == len(lines()) <= len(set(hosts))
    for rank, who in waits.items():
        assert re.search(rf"has waited \d\.\d s: {who}", found[rank]), found[rank]


def test_a_time_limit_names_the_silent_host(settings: Callable[..., None]) -> None:
    """On all ranks that wait, also on those that leave it to the first one of their host."""
    settings(timeout=0.4)
    ended = [threading.Event() for _ in range(2)]

    def body(seat: Seat) -> None:
        ring = seat.open(1)
        if seat.rank >= 2:
            assert all(one.wait(LATE) for one in ended)
            return
        error = CollectiveAborted if seat.rank else CollectiveTimeout
        ends(ring.barrier, error, "rank 0: barrier .* timed out: the host of ranks 2-3 has not answered")
        ended[seat.rank].set()

    as_threads(4, body, hosts=(0, 0, 1, 1))


@pytest.mark.parametrize("queued", [False, True])
def test_an_operation_without_a_name_is_reported(queued: bool, tmp_path: Path) -> None:
    """By one of the ranks that wait, once; a joined rank is meant to wait."""
    said = tmp_path / "said"

    def body(seat: Seat) -> None:
        ring = seat.open(1, stall_warning=0.3)
        if seat.rank == 1:
            until(lambda: "[ring]" in said.read_text())
        ring.barrier(blocking=not queued).wait()
        if seat.rank == 2:
            time.sleep(0.6)  # long enough for a report, which must not come
        ring.join()

    with stderr_into(said):
        as_threads(3, body)
    lines = [line for line in said.read_text().splitlines() if line.startswith("[ring]")]
    assert len(lines) == 1
    assert re.fullmatch(
        r"\[ring\] rank 0: barrier \(sequence 2\) has waited \d\.\d s: rank 1 has not called it", lines[0]
    )
