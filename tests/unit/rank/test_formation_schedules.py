"""Seeded random schedules of a formation: whatever comes or ends when, no two ranks form with different members."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ring_notebook import RendezvousServer
from ring_notebook.config import config
from ring_notebook.core.place import _together
from ring_notebook.errors import RingError
from ring_notebook.launch.connections.pmi import PmiServer, lines
from ring_notebook.rank.rendezvous import JOB, Rendezvous, _connect
from ring_notebook.rank.rendezvous_server import JOIN

LIMIT = 60.0
STEPS = 3


class Ended(BaseException):
    """The process of a rank has ended, in whatever it did."""


def form(rendezvous: Rendezvous, disturb: Callable[[int], None]) -> tuple[Any, ...]:
    """What this rank knows of the others once they have formed, in the steps of `ring_notebook.core.place`."""
    own = f"{rendezvous.rank} of {rendezvous.members}"
    found: list[Any] = []
    for step in range(STEPS):

        def give(step: int = step) -> str:
            disturb(step)
            return own

        found.append(tuple(_together(rendezvous, give, last=step == STEPS - 1)))
    return (*found, rendezvous.key)


# Through inherited sockets: one thread runs at a time, and the dice say which message arrives next.


class Wire:
    """Stands for the socket of a rank. A reader yields to other ranks until the schedule delivers a message."""

    family = socket.AF_UNIX

    def __init__(self, rank: Inherited) -> None:
        self._rank = rank
        self.out = b""
        self.unread = b""

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is None, "a rank of ours waits for as long as its supervisor lives"

    def sendall(self, data: bytes) -> None:
        self.out += data

    def recv(self, size: int) -> bytes:
        self._rank.pause()
        piece, self.unread = self.unread[:size], self.unread[size:]
        return piece

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Inherited:
    """A process that is a rank of a job of ours; ``plan`` are the formations that it forms in, with their members."""

    number: int
    size: int
    plan: list[tuple[int, list[int]]]
    dice: random.Random
    faults: bool
    formed: dict[int, Any] = field(default_factory=dict)
    disturbed: set[int] = field(default_factory=set)
    """Formations in which it was interrupted, failed by itself, ended or was given other members."""
    formation: int = -1
    ended: bool = False
    raised: type[BaseException] | None = None
    """What its next turn has to raise."""

    def __post_init__(self) -> None:
        self.wire = Wire(self)
        self._go, self._gone = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._main, daemon=True).start()

    def pause(self) -> None:
        """Wait for the next turn."""
        self._gone.release()
        assert self._go.acquire(timeout=LIMIT)
        if self.raised is not None:
            error, self.raised = self.raised, None
            raise error

    def run(self) -> None:
        """Give it a turn, until it reads or ends."""
        self._go.release()
        assert self._gone.acquire(timeout=LIMIT)

    def _main(self) -> None:
        assert self._go.acquire(timeout=LIMIT)
        rendezvous = Rendezvous(cast(socket.socket, self.wire), self.number, self.size)
        try:
            for formation, members in self.plan:
                self.formation = formation
                rendezvous.begin(self.formation, members)
                try:
                    self.formed[self.formation] = form(rendezvous, self._disturb)
                except (RingError, KeyboardInterrupt, MemoryError):
                    continue
        except Ended:
            pass
        self.ended = True
        self._gone.release()

    def _disturb(self, step: int) -> None:
        if self.faults and self.dice.random() < 0.05:
            self.disturbed.add(self.formation)
            raise MemoryError(f"in step {step}")


class Supervised:
    """One schedule of a job whose ranks a supervisor has started."""

    def __init__(self, seed: int) -> None:
        self._dice = dice = random.Random(seed)
        self.size = dice.randrange(2, 5)
        self.faults = seed % 4 > 0
        everyone = list(range(self.size))
        self.members = {0: everyone}
        for formation in range(1, dice.randrange(1, 4)):
            some = sorted(dice.sample(everyone, dice.randrange(1, self.size + 1)))
            self.members[formation] = dice.choice((everyone, some))
        self._server = PmiServer("job", [0] * self.size)
        self._waiting = everyone[:]  # to be started
        self.processes: list[Inherited] = []
        self._living: dict[int, Inherited] = {}

    def run(self) -> None:
        while choices := list(self._choices()):
            self._dice.choice(choices)()
        left = [one.number for one in self._living.values()]
        for process in list(self._living.values()):
            self._end(process)
        assert not left, f"ranks {left} wait, and nothing comes any more"

    def _choices(self) -> Iterator[Callable[[], None]]:
        for number in self._waiting:
            yield lambda number=number: self._start(number)  # type: ignore[misc]
        for process in self._living.values():
            if process.wire.out:
                yield lambda process=process: self._serve(process)  # type: ignore[misc]
            if process.wire.unread:
                yield lambda process=process: self._turn(process)  # type: ignore[misc]
        if self.faults and self._living and self._dice.random() < 0.03:
            victim = self._dice.choice(list(self._living.values()))
            yield lambda: self._end(victim)
            yield lambda: self._interrupt(victim)

    def _start(self, number: int) -> None:
        self._waiting.remove(number)
        begun = max((one.formation for one in self.processes), default=-1)
        again = any(one.number == number for one in self.processes)
        first = begun + 1 if again else 0
        plan = [(one, members) for one, members in self.members.items() if one >= first and number in members]
        other = [one for one in range(self.size) if one == number or self._dice.random() < 0.5]
        odd = self._dice.choice([one for one, _ in plan]) if plan and self._dice.random() < 0.1 * self.faults else -1
        plan = [(one, other if one == odd else members) for one, members in plan]
        process = Inherited(number, self.size, plan, self._dice, self.faults)
        process.disturbed.add(odd)
        self.processes.append(process)
        self._living[number] = process
        if again:
            self._server.started(number)
        self._turn(process)

    def _turn(self, process: Inherited) -> None:
        process.run()
        if process.ended and self._living.pop(process.number, None):
            self._serve(process)
            self._tell(lines(self._server.gathering.exited(process.number, "exit code 0")))

    def _serve(self, process: Inherited) -> None:
        """Some of what the rank has sent arrives, cut anywhere; all of it where it has ended."""
        end = len(process.wire.out) if process.ended else self._dice.randrange(len(process.wire.out)) + 1
        if self._dice.random() < 0.7:
            end = len(process.wire.out)
        data, process.wire.out = process.wire.out[:end], process.wire.out[end:]
        self._tell(self._server.receive(process.number, data))

    def _tell(self, replies: dict[int, bytes]) -> None:
        for number, data in replies.items():
            if number in self._living:
                self._living[number].wire.unread += data

    def _end(self, process: Inherited) -> None:
        process.disturbed.add(process.formation)
        process.raised = Ended
        del self._living[process.number]
        process.run()
        if process.wire.out and self._dice.random() < 0.5:  # what it has sent may arrive before its end
            self._serve(process)
        self._tell(lines(self._server.gathering.exited(process.number, "SIGKILL")))
        if self._dice.random() < 0.5:
            self._waiting.append(process.number)

    def _interrupt(self, process: Inherited) -> None:
        process.disturbed.add(process.formation)
        process.raised = KeyboardInterrupt
        self._turn(process)

    def check(self) -> None:
        for formation, members in self.members.items():
            there = [one for one in self.processes if formation in dict(one.plan) and one.formation >= formation]
            formed = [one for one in there if formation in one.formed]
            assert len({one.formed[formation] for one in formed}) <= 1, "ranks have formed with different others"
            if any(formation not in one.disturbed for one in formed):
                without = [one.number for one in there if one not in formed and formation not in one.disturbed]
                assert not without, f"ranks {without} have not formed in {formation}, and others have"
            if not self.faults and formation == max(self.members):
                assert len(formed) == len(members)


@pytest.mark.parametrize("count", [100, pytest.param(2_000, marks=pytest.mark.slow)])
def test_ranks_of_a_supervisor(count: int) -> None:
    """Messages cut anywhere, ranks that start late, are killed, interrupted, fail by themselves and start again."""
    formed = 0
    for seed in range(count):
        schedule = Supervised(seed)
        try:
            schedule.run()
            schedule.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        formed += sum(bool(one.formed) for one in schedule.processes)
    assert formed > count


# At an address: real sockets, with a thread for each process.


@dataclass
class Caller:
    """A process that calls a rendezvous at an address, as the dice have drawn it."""

    rank: int | None
    size: int | None
    delay: float
    """Seconds until it comes."""
    fault: str = ""
    """``stranger``, ``noise``: it has another secret, or ends with some bytes of its first message. ``ends``,
    ``fails``: it ends, or raises, in a step."""
    step: int = 0
    formed: Any = None
    raised: BaseException | None = None

    def main(self, where: str, secret: bytes, limit: float) -> None:
        time.sleep(self.delay)
        channel: socket.socket | None = None
        try:
            if self.fault == "noise":
                channel = _connect(where, secret, limit, time.monotonic() + limit, "a stranger")
                channel.sendall(f'cmd={JOIN} value={{"rank": 0}}'.encode()[: 9 * self.step])
                reset(channel)
                return
            rendezvous = Rendezvous._join(where, secret, self.rank, self.size)
            channel = rendezvous._channel
            try:
                self.formed = form(rendezvous, lambda step: self._disturb(step, rendezvous._channel))
            finally:
                rendezvous.close()
        except (RingError, MemoryError, Ended) as error:
            self.raised = error

    def _disturb(self, step: int, channel: socket.socket) -> None:
        if step != self.step:
            return
        if self.fault == "fails":
            raise MemoryError
        if self.fault == "ends":
            reset(channel)
            raise Ended


def reset(channel: socket.socket) -> None:
    """Close a connection as the end of a process does that has not read everything."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    channel.close()


def draw(dice: random.Random) -> tuple[int, list[Caller], bool]:
    """Size, callers, and whether nothing is wrong with them."""
    size = dice.randrange(1, 5)
    numbered = dice.random() < 0.5
    callers = [
        Caller(rank if numbered and rank else None, dice.choice((size, None)), dice.choice((0.0, 0.0, 0.001, 0.003)))
        for rank in range(size)
    ]
    wrong = dice.choice(("", "", "ends", "fails", "size", "twice", "missing", "more", "all at once"))
    victim = dice.choice(callers)
    if wrong in ("ends", "fails"):
        victim.fault, victim.step = wrong, dice.randrange(STEPS)
    elif wrong == "size":
        victim.size = size + 1
    elif wrong == "twice":
        victim.rank = dice.randrange(1, size + 1)
    elif wrong == "missing":
        callers.remove(victim)
    elif wrong == "more":
        callers.append(Caller(None, None, dice.choice((0.0, 0.005))))
    elif wrong == "all at once":
        for caller in callers:
            caller.fault, caller.step = dice.choice(("", "ends", "fails")), dice.randrange(STEPS)
    callers += [
        Caller(None, None, 0.0, fault, dice.randrange(4)) for fault in ("stranger", "noise") if dice.random() < 0.2
    ]
    is_good = not wrong and all(caller.fault != "noise" for caller in callers)
    return size, callers, is_good


def meet(seed: int) -> int:
    """How many have formed in one schedule."""
    size, callers, is_good = draw(random.Random(seed))
    with RendezvousServer(size) as server:
        where, secret = server.variables["RING_RENDEZVOUS"], server.variables["RING_RENDEZVOUS_SECRET"].encode()
        threads = [
            threading.Thread(
                target=caller.main,
                args=(where, b"another secret 1" if caller.fault == "stranger" else secret, config().start_timeout),
                daemon=True,
            )
            for caller in callers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a rank waits for longer than it may"
    jobs: dict[bytes, list[tuple[Any, ...]]] = {}  # one more may be a job of its own, where that has one rank
    for caller in callers:
        if caller.formed is not None:
            jobs.setdefault(caller.formed[-1], []).append(caller.formed)
    ended = sum(isinstance(one.raised, Ended) for one in callers)
    for formed in jobs.values():
        assert len(set(formed)) == 1, f"ranks have formed with different others: {formed}"
        assert len(set(formed[0][0])) == size, f"two ranks are one: {formed[0]}"
        assert len(formed) + ended >= size, f"only {len(formed)} of {size} ranks have formed"
    assert len(jobs) == 1 or not is_good, [caller.raised for caller in callers]
    return sum(map(len, jobs.values()))


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_ranks_at_an_address(count: int, monkeypatch: pytest.MonkeyPatch, settings: Callable[..., None]) -> None:
    """Ranks that are late, missing, one too many or twice there, end or fail, and strangers among them."""
    for name in (*JOB, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    formed = 0
    for seed in range(count):
        settings(start_timeout=20 if draw(random.Random(seed))[2] else 0.1)
        try:
            formed += meet(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert formed > count / 4
