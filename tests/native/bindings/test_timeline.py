"""What operations record: phases in order, on one clock, with the rank that was waited for."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from native.ranks import LAUNCHERS, Seat, as_hosts, as_threads, on_ranks
from native.values import Tensor
from ring_notebook.core.buffers import DType
from ring_notebook.core.communicator import Communicator, receive, send

Event = tuple[int, int, str, str, str, int, int, int, int]
PHASES = ["queued", "packing", "waiting", "moving"]


def allreduce(ring: Communicator, name: str, count: int, *, blocking: bool = True) -> None:
    """A sum of ones, waited for."""
    tensor = Tensor.of(ring, np.ones(count), DType.FLOAT32)
    ring.allreduce([tensor.buffer], [tensor.buffer], name=name, blocking=blocking).wait()


def named(events: list[Event], name: str) -> list[Event]:
    """The events of one operation, in order of time, without what its caller did meanwhile."""
    return sorted(event for event in events if event[4] == name and not event[2].startswith("held"))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_phases_follow_one_another(launcher: str, blocking: bool) -> None:
    """From the call to the result without a gap, inside the time that the call took; sizes and sequences are right.

    What is queued with a name has a phase for the agreement on it, and a thread for its group's names.
    """
    first, group = ("queued", 0) if blocking else ("negotiating", 1 << 16)

    def body(seat: Seat) -> None:
        ring = seat.open()
        ring.record()
        begun = time.monotonic_ns()
        allreduce(ring, "small", 3, blocking=blocking)
        allreduce(ring, "large", 300_000, blocking=blocking)
        ended = time.monotonic_ns()
        events = ring.recorded()
        # By name an operation comes behind the round that agreed on it.
        for name, count, sequence in (("small", 3, 2), ("large", 300_000, 3 if blocking else 4)):
            own = named(events, name)
            phases = [event[2] for event in own]
            assert phases[:3] == [first, "packing", "waiting"]
            if launcher != "hosts":  # which wait at several gates until all of them have come
                assert {*phases[3:]} == {"moving"}, "a wait for more of the data is none for a rank"
            assert phases[-1] == "moving"
            assert begun <= own[0][0]
            assert own[-1][1] <= ended
            assert all(before[1] == after[0] for before, after in itertools.pairwise(own))
            assert {(event[3], *event[5:8]) for event in own} == {("allreduce", sequence, 4 * count, group)}

    LAUNCHERS[launcher](3, body)


def test_a_wait_for_the_link_is_sending() -> None:
    """Sooner or later: an operation whose peer has sent all by then does not wait."""
    waited: set[int] = set()

    def body(seat: Seat) -> None:
        ring = seat.open()
        ring.record()
        while not waited >= {0, 1}:  # the third one shares a host, whose first rank sends for both
            seat.meet()
            allreduce(ring, "large", 3_000_000)
            if "sending" in [event[2] for event in ring.recorded()]:
                waited.add(seat.rank)
            seat.meet()

    as_hosts(3, body)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_messages_are_named_by_peer_and_tag(seat: Seat, launcher: str) -> None:
    """What goes to rank 1 with tag 5, and what rank 1 receives from whichever rank."""
    ring = seat.open()
    ring.record()
    tensor = Tensor.of(ring, np.ones(3), DType.FLOAT32)
    if seat.rank == 2:
        send(ring, tensor.buffer, 1, tag=5)
    elif seat.rank == 1:
        receive(ring, tensor.buffer, tag=5)
    ring.barrier()
    names = {(event[3], event[4]) for event in ring.recorded() if event[3] != "barrier"}
    expected = {1: {("receive", "from rank 2, tag 5")}, 2: {("send", "to rank 1, tag 5")}}
    assert names == expected.get(seat.rank, set())


@on_ranks(3)
def test_who_was_waited_for(seat: Seat) -> None:
    """The rank that came last is named by those who waited, with the time that they lost."""
    ring = seat.open()
    ring.record()
    if seat.rank == 1:
        time.sleep(0.5)
    allreduce(ring, "late", 3)
    first_wait = next(event for event in named(ring.recorded(), "late") if event[2] == "waiting")
    assert first_wait[8] == 1
    assert seat.rank == 1 or first_wait[1] - first_wait[0] > 100_000_000


@on_ranks(2, gives=[{1, 2}, {1, 2}])
def test_groups_have_tracks_of_their_own(seat: Seat) -> set[int]:
    """Every group of the generation records, under a number that its members agree on."""
    ring = seat.open()
    groups = [ring.group([0, 1]), ring.group([1, 0])]
    ring.record()
    for group in groups:
        assert group is not None
        allreduce(group, "in a group", 3)
    return {event[7] for event in named(ring.recorded(), "in a group")}


@on_ranks(2)
def test_nothing_is_recorded_unless_asked(seat: Seat) -> None:
    """Off at first and off again after `recorded`; the newest events are kept when the buffer is full."""
    ring = seat.open()
    allreduce(ring, "before", 3)
    assert ring.recorded() == []
    ring.record(capacity=8)
    for step in range(10):
        allreduce(ring, f"step {step}", 3)
    events = ring.recorded()
    assert len(events) == 8
    assert {event[4] for event in events} == {"step 8", "step 9"}
    allreduce(ring, "after", 3)
    assert ring.recorded() == []


@on_ranks(2)
def test_events_are_given_while_the_recording_continues(seat: Seat) -> None:
    """Each event is taken once and in order, also those after the first call and those that the end gives."""
    ring = seat.open()
    ring.record()
    names = []
    for step in range(3):
        allreduce(ring, f"step {step}", 3)
        events = ring.recorded(end=step == 2)
        assert [event[2] for event in events if not event[2].startswith("held")][:3] == PHASES[:3]
        assert "held" in [event[2] for event in events]
        names += [event[4] for event in events]
        assert step == 2 or ring.recorded(end=False) == []
    assert list(dict.fromkeys(names)) == ["step 0", "step 1", "step 2"]
    allreduce(ring, "after", 3)
    assert ring.recorded(end=False) == []


@on_ranks(2)
def test_recordings_have_the_capacity_that_they_ask_for(seat: Seat) -> None:
    """Each its own, and none of the events of the one before; one that is under way goes on as it is."""
    ring = seat.open()
    for capacity in (4, 12, 4, 1 << 10):
        ring.record(capacity)
        ring.record(1)
        for step in range(5):
            allreduce(ring, f"{capacity} {step}", 3)
        events = ring.recorded()
        assert min(capacity, 25) <= len(events) <= min(capacity, 30)  # five events each, six where it was held up
        assert {event[4].split()[0] for event in events} == {str(capacity)}
        ends = [event[1] for event in events if event[2] != "held up"]
        assert ends == sorted(ends)
    ring.record(4)
    assert ring.recorded() == []
    with pytest.raises(ValueError, match="at least one event"):
        ring.record(0)


def test_recordings_begin_and_end_beside_the_progress_thread() -> None:
    """Which looks for one whenever a step of an operation ends."""

    def body(seat: Seat) -> int:
        ring = seat.open()
        seen = 0
        for turn in range(100):
            tensor = Tensor.of(ring, np.ones(3), DType.FLOAT32)
            works = [ring.allreduce([tensor.buffer], [tensor.buffer], blocking=False) for _ in range(5)]
            ring.record(capacity=8 + turn % 3)
            works[0].wait()
            events = ring.recorded()
            assert all(begin <= end for begin, end, *_ in events)
            seen += len(events)
            for work in works:
                work.wait()
        return seen

    assert all(as_threads(2, body))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@on_ranks(3)
def test_waiting_for_a_late_rank_is_told_from_moving_data(seat: Seat, launcher: str, blocking: bool) -> None:
    """The ranks that come in time wait; the late one does not, and nobody waits for what moves afterwards."""
    ring = seat.open()
    allreduce(ring, "first", 3)
    before, began = ring.seconds_spent(), ring.counts()["operations"]
    ring.record()
    if seat.rank == 1:
        time.sleep(1.0)
    allreduce(ring, "late", 3, blocking=blocking)
    spent, waited = (now - then for now, then in zip(ring.seconds_spent(), before, strict=True))
    assert waited <= spent
    # A recording says the same.
    recorded = [(event[2], (event[1] - event[0]) * 1e-9, event[8]) for event in ring.recorded()]
    assert sum(seconds for phase, seconds, _ in recorded if phase == "held") == pytest.approx(spent, abs=1e-3)
    held_up = [(seconds, last) for phase, seconds, last in recorded if phase == "held up"]
    assert sum(seconds for seconds, _ in held_up) == pytest.approx(waited, abs=1e-6)
    if seat.rank != 1:
        assert {last for _, last in held_up} == {1 if blocking and launcher != "hosts" else -1}
    assert waited < 0.5 if seat.rank == 1 else waited > 0.5
    assert ring.counts()["operations"] == began + blocking
