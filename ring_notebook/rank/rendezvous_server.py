"""The server of the rendezvous, in a supervisor or at an address of its own: values of ranks go to all.

`Gathering` decides, without sockets. A supervisor feeds it from the sockets that its ranks inherit
(`ring_notebook.launch.connections`), `RendezvousServer` from connections whose other ends prove that they know a
secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ring_notebook.rank.secure_streams import tls_of_secret
from ring_notebook.rank.serving import MOST_STRANGERS, Serving

RENDEZVOUS, SECRET = "RING_RENDEZVOUS", "RING_RENDEZVOUS_SECRET"
GATHER, GATHERED, JOIN, GIVE_UP = "ring_gather", "ring_gathered", "ring_join", "ring_give_up"
ASSEMBLE = "ring_assemble"
ACCEPTED = b"+"
_KEY_BYTES = 32
_NOT_JOINED = "rank {} has not joined the others"

Replies = dict[int, dict[str, Any]]
"""What to send to which ranks."""


class Gathering:
    """The values that ranks 0 to ``size`` - 1 of a job, which may be ``elastic``, have given.

    Ranks form once in each formation, which has a number. A request of a newer formation ends the waits of an older
    one. The living ranks of an elastic job assemble for each generation. New processes join them there: then all form
    again, in the next formation.
    """

    def __init__(self, size: int, elastic: bool = False) -> None:
        self._size = size
        self._elastic = elastic
        self.least = 0
        """The least ranks with which an elastic job continues; fewer wait for others to join."""
        self._gone: dict[int, str] = {}
        self._joining: dict[int, int] = {}  # by waiting process: the generation after which it joins
        self._formed = set(range(size))  # members of the newest formation that live
        self._next = 0  # the newest formation that an elastic job is to form
        self._since: dict[int, int] = {}  # the formation that admitted each rank
        # By waiting rank: the ranks that it waits for, and the last generation.
        self._assembling: dict[int, tuple[frozenset[int], int]] = {}
        self._assembled: dict[int, dict[str, Any]] = {}  # what each rank was answered last
        self.left_out: set[int] = set()
        """The ranks that others have continued without."""
        self.joined: set[int] = set()
        """The ranks that formations have admitted; the reader removes them."""
        self.dismissed: set[int] = set()
        """The dismissed ranks that others have continued without; the reader removes them."""
        self._leaving: set[int] = set()
        self._begin(0)

    def _begin(self, formation: int) -> None:
        self._formation = formation
        self._key = secrets.token_hex(_KEY_BYTES)
        self._values: dict[int, Any] = {}
        self._awaited: tuple[int, tuple[int, ...], bool] | None = None  # step and members of waiting ranks, and `last`
        self.has_formed = False
        self.error = ""
        """Why the ranks of this formation have not formed, and will not."""

    def take(self, rank: int, request: object) -> Replies:
        """Rank ``rank`` gives a value. Raises ValueError for what is no request."""
        formation, step, members, last, value = self._read(rank, request)
        replies: Replies = {}
        if formation > self._formation:
            replies = self.refuse(f"the ranks begin formation {formation}")
            self._begin(formation)
        elif formation < self._formation or self.has_formed:
            why = f"formation {formation} is over; the ranks have formed without this one"
            return {rank: {"error": why, "formation": formation, "step": step}}
        if self._awaited not in (None, (step, members, last)):
            return self.refuse(why := f"rank {rank} has begun again while others waited for it") | {
                rank: {"error": why, "formation": formation, "step": step}
            }
        self._awaited = step, members, last
        self._values[rank] = value
        if gone := [self._gone[member] for member in members if member in self._gone]:
            return replies | self.refuse(gone[0])
        if len(self._values) < len(members):
            return replies
        values = [self._values.get(one) for one in range(self._size)]
        answer = {"values": values, "key": self._key, "elastic": self._elastic}
        replies |= dict.fromkeys(members, answer | self._echo())
        self._values, self._awaited, self.has_formed = {}, None, last
        if last:
            self.joined |= set(members) - self._formed
            self._formed, self._leaving = set(members), set()
        return replies

    def _read(self, rank: int, request: object) -> tuple[int, int, tuple[int, ...], bool, Any]:
        if not isinstance(request, dict):
            raise ValueError(f"rank {rank}: expected a request, got {request!r:.100}")
        formation, step = request.get("formation"), request.get("step")
        members = request.get("members") or list(range(self._size))
        if not (isinstance(formation, int) and isinstance(step, int) and isinstance(members, list)):
            raise ValueError(f"rank {rank}: expected formation, step and members, got {request!r:.100}")
        known = {one for one in members if type(one) is int and 0 <= one < self._size}
        if rank not in known or len(known) < len(members):
            raise ValueError(f"rank {rank}: expected it among ranks below {self._size}, got {members!r:.100}")
        return formation, step, tuple(members), bool(request.get("last")), request.get("value")

    def assemble(self, rank: int, request: object) -> Replies:
        """``rank`` asks for the generation after ``generation``, with the living ``ranks``; answer when all ask.

        All get the same number of the ``next`` generation and the same ``members``. An interrupted rank asks again. A
        process that joins asks with no ``ranks``: the others are notified, and when they assemble it gets the same
        answer. ``forms`` then holds the formation in which all form first, and the size of the job; joined processes
        are the last ``members``. Raises ValueError for a request of another form.
        """
        if not isinstance(request, dict):
            raise ValueError(f"rank {rank}: expected a request, got {request!r:.100}")
        ranks, generation = request.get("ranks"), request.get("generation")
        known = range(self._size)
        joins = ranks == [] and rank not in self._formed
        if not (
            isinstance(generation, int)
            and isinstance(ranks, list)
            and (joins or rank in ranks)
            and all(r in known for r in ranks)
        ):
            raise ValueError(f"rank {rank}: expected it among ranks, and a generation, got {request!r:.100}")
        if (answer := self._assembled.get(rank)) and answer["next"] > generation:  # the others have counted on it
            return {rank: answer | {"generation": generation}}
        if joins:
            self._gone[rank] = _NOT_JOINED.format(rank)
            self._joining[rank] = generation
            return self._update() | self._count_all()
        self._assembling[rank] = frozenset(ranks), generation
        return self._count(rank)

    def _count_all(self) -> Replies:
        replies: Replies = {}
        for one in list(self._assembling):
            if one in self._assembling:  # else it has just been answered
                replies |= self._count(one)
        return replies

    def _count(self, rank: int) -> Replies:
        """Answer ``rank``, the ranks that it waits for and the processes that join, once all of them assemble."""
        members = self._assembling[rank][0].difference(self._gone)
        # A rank that did not see the last generation open still names the members of that one.
        waiting = {one: call for one, call in self._assembling.items() if call[0].difference(self._gone) == members}
        if not waiting.keys() >= members:
            return {}
        if members >= self._formed:  # not a part of the job
            stay = members - self._leaving
            if not stay or len(stay | self._joining.keys()) < self.least:  # those that leave wait for others
                stay = members
            if len(stay | self._joining.keys()) < self.least:
                return {}
            for one in members - stay:
                self._gone[one] = f"rank {one} was to leave the job"
            self._formed -= members - stay
            self.dismissed |= members - stay
            members = stay
            waiting = {one: call for one, call in waiting.items() if one in stay}
            waiting |= {one: (members, generation) for one, generation in self._joining.items()}
        number = 1 + max(generation for _, generation in waiting.values())
        taken, forms = members | waiting.keys(), dict[str, list[int]]()
        if not taken <= self._formed:
            self._next = max(self._next, self._formation) + 1
            self._since |= dict.fromkeys(self._joining, self._next)
            forms = {"forms": [self._next, self._size]}
        order = sorted(taken, key=lambda one: (self._since.get(one, 0), one))
        self.left_out -= taken
        for one, (ranks, generation) in waiting.items():
            self.left_out |= ranks - taken
            self._assembled[one] = {"generation": generation, "next": number, "members": order, **forms}
            self._assembling.pop(one, None)
            if self._joining.pop(one, None) is not None:
                del self._gone[one]
        return {one: self._assembled[one] for one in waiting}

    def dismiss(self, ranks: set[int]) -> Replies:
        """Have these ranks, and no others, leave at the job's next assembly; notifies the ranks that train."""
        before, self._leaving = self._leaving, ranks & self._formed
        return {} if self._leaving <= before else self._update()

    def _update(self) -> Replies:
        """Notify the ranks that train: the job changes when they assemble next."""
        return {one: {"updated": True} for one in self._formed}

    def give_up(self, rank: int) -> Replies:
        """Rank ``rank`` stops waiting for others to assemble; the answer says which are missing."""
        if rank not in self._assembling:
            return {}
        ranks, generation = self._assembling.pop(rank)
        missing = sorted(ranks - {rank} - self._gone.keys() - self._assembling.keys())
        return {rank: {"generation": generation, "missing": missing}}

    def exited(self, rank: int, how: str) -> Replies:
        """Rank ``rank`` has exited; returns what to send to those that wait for it."""
        self._gone[rank] = f"rank {rank} exited ({how}) before all ranks had called init()"
        self._formed.discard(rank)
        self._assembling.pop(rank, None)
        self._joining.pop(rank, None)
        first = self._formation == 0 or not self._elastic  # else those that live form again without it
        if not self.has_formed and first:
            self.error = self.error or self._gone[rank]
        refused = self._awaited and rank in self._awaited[1] and not self.has_formed
        replies = self.refuse(self._gone[rank]) if refused else {}
        return replies | (self._count_all() if self.has_formed or not first else {})

    def started_again(self, rank: int) -> None:
        """Another process is rank ``rank`` now, one of an elastic job once it has joined the others."""
        if not self._elastic:
            self._gone.pop(rank, None)
        elif self.has_formed or self._formation:
            self._gone[rank] = _NOT_JOINED.format(rank)
        self._assembled.pop(rank, None)
        self.left_out.discard(rank)

    def resize(self, size: int) -> None:
        """The job has ranks 0 to ``size`` - 1 from the next formation on."""
        self._size = size

    @property
    def waiting(self) -> set[int]:
        return set(self._values)

    def refuse(self, why: str) -> Replies:
        """Answer all waiting ranks with the error ``why``."""
        waiting, self._values = list(self._values), {}
        replies = {rank: {"error": why} | self._echo() for rank in waiting}
        self._awaited = None
        return replies

    def _echo(self) -> dict[str, Any]:
        """Which request an answer belongs to: an interrupted rank has sent another one since."""
        return {"formation": self._formation, "step": self._awaited[0] if self._awaited else None}


@dataclass(slots=True, eq=False)
class _Member:
    """A process that has proven that it knows the secret; ``rank`` is -1 until one is assigned."""

    writer: asyncio.StreamWriter
    rank: int
    host: str
    about: str


class RendezvousServer(Serving):
    """Lets ``size`` processes, which anything may have started, find each other as the ranks of a job.

    It listens at ``address``, by default at a port of loopback that the system chooses; processes of other hosts need
    an address that they reach. If that is a name which leads to loopback on this host, it listens at all addresses.
    `variables` is what the environment of every rank has to hold. Ranks that do not say
    which they are (RING_RANK) are numbered host by host as they come. Job after job of ``size`` ranks may form here,
    until `close`. Raises OSError where it cannot listen.

        with RendezvousServer(2) as server:
            ranks = [Popen(["python", "train.py"], env=os.environ | server.variables) for _ in range(2)]
            for rank in ranks:
                rank.wait()
    """

    def __init__(self, size: int, address: str = "127.0.0.1:0", secret: str = "") -> None:
        if size < 1:
            raise ValueError(f"a rendezvous needs at least one rank, got size={size}")
        self._size = size
        self._secret = secret or secrets.token_hex(_KEY_BYTES)
        listener = _listen(address)
        host, port = (address, "") if address.startswith("@") else address.rsplit(":", 1)
        self._address = f"{host}:{listener.getsockname()[1]}" if port else host
        self._members: list[_Member] = []
        self._gathering: Gathering | None = None  # once all have come
        self._tls = None if listener.family == socket.AF_UNIX else tls_of_secret(self._secret.encode(), server=True)
        super().__init__("ring-rendezvous", listener)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that make a process a rank: the address, and the secret, which belongs in no command line."""
        return {RENDEZVOUS: self._address, SECRET: self._secret}

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _serve(self) -> None:
        try:
            await super()._serve()
        finally:
            self._refuse(f"the rendezvous at {self._address} has ended")

    async def _answer(self, channel: socket.socket) -> None:
        """A process has connected: it proves who it is, joins, and gathers."""
        member: _Member | None = None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await self._streams(channel, self._tls)
            writer.write(ACCEPTED)  # only now: nobody cancels it any more
            member = self._join(writer, *_parse(await reader.readline()))
            while line := await reader.readline():
                self._take(member, *_parse(line))
        except (OSError, EOFError, ValueError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            if member in self._members:
                self._refuse(f"{_name(member)} exited before all ranks had called init()")
            if writer is not None:
                writer.close()

    def _join(self, writer: asyncio.StreamWriter, command: str, request: Any) -> _Member | None:
        """Make a process a rank. If that fails, refuse all, because the others would wait for ever."""
        if command != JOIN or not isinstance(request, dict):
            raise ValueError("no rank")
        rank, size = request.get("rank"), request.get("size")
        member = _Member(writer, rank if type(rank) is int else -1, str(request.get("host")), str(request.get("about")))
        name = _name(member)
        if self._gathering is not None:
            writer.write(_line({"error": f"all {self._size} ranks have come already; {name} is one more"}))
            return None
        twin = next((one for one in self._members if one.rank == member.rank >= 0), None)
        self._members.append(member)
        if size not in (None, self._size):
            self._refuse(f"the rendezvous is for {self._size} ranks, and {name} expects {size!r:.20}")
        elif twin is not None:
            self._refuse(f"rank {member.rank} has come twice: {twin.about} and {member.about}")
        elif member.rank >= self._size:
            self._refuse(f"the rendezvous is for {self._size} ranks, and {name} has come")
        elif len(self._members) == self._size:
            self._assign()
        return member

    def _assign(self) -> None:
        """All have come: give ranks to those that have none, host by host as they came, and let them gather."""
        hosts = list(dict.fromkeys(member.host for member in self._members))
        free: Iterator[int] = iter(sorted(set(range(self._size)) - {member.rank for member in self._members}))
        # Ranks of this host that came over loopback listen where those of other hosts have found it.
        reached = [_own_address(member.writer) for member in self._members]
        outer = next((address for address in reached if address and not is_loopback(address)), "")
        for member in sorted(self._members, key=lambda member: hosts.index(member.host)):
            member.rank = member.rank if member.rank >= 0 else next(free)
            address = outer if is_loopback(_own_address(member.writer)) else ""
            member.writer.write(_line({"rank": member.rank, "size": self._size, "address": address}))
        self._gathering = Gathering(self._size)

    def _take(self, member: _Member | None, command: str, request: Any) -> None:
        if member not in self._members:
            return
        assert member is not None
        if command == GIVE_UP:
            heard = {one.rank for one in self._members} if self._gathering is None else self._gathering.waiting
            missing = ", ".join(map(str, sorted(set(range(self._size)) - heard)))
            names = "" if -1 in heard else f"; nothing was heard of {'ranks' if ',' in missing else 'rank'} {missing}"
            self._refuse(
                f"expected {self._size} ranks, got {len(heard)} within the {request!s:.9} s for which {_name(member)} "
                f"waits{names}. RING_START_TIMEOUT sets how long a rank waits"
            )
        elif command == GATHER and self._gathering is not None:
            writers = {one.rank: one.writer for one in self._members}
            lines: dict[int, bytes] = {}  # by reply, because a gathering's is the same for all
            for rank, reply in self._gathering.take(member.rank, request).items():
                if id(reply) not in lines:
                    lines[id(reply)] = _line(reply)
                writers[rank].write(lines[id(reply)])
            if self._gathering.has_formed:
                self._members, self._gathering = [], None

    def _refuse(self, why: str) -> None:
        """These ranks will not form; others may come."""
        for member in self._members:
            member.writer.write(_line({"error": why}))
        self._members, self._gathering = [], None


def resolve(address: str) -> tuple[socket.AddressFamily, Any]:
    """Family and address of a socket, for ``host:port`` or, in Linux's abstract namespace, ``@name``.

    Raises OSError for a host that has no address.
    """
    if address.startswith("@"):
        return socket.AF_UNIX, f"\0{address[1:]}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{RENDEZVOUS}={address}: expected HOST:PORT")
    family, _, _, _, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return family, found


def is_loopback(host: str) -> bool:
    """Whether a name, which is not resolved, or an address means this host to itself alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost" or host.lower().startswith(("localhost.", "ip6-"))


def _own_address(writer: asyncio.StreamWriter) -> str:
    """The address at which a caller has found this host; empty for a caller over a Unix socket."""
    name = writer.get_extra_info("sockname")
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""


def _listen(address: str) -> socket.socket:
    family, place = resolve(address)
    if family != socket.AF_UNIX:
        if is_loopback(place[0]) and not is_loopback(address.rpartition(":")[0].strip("[]")):
            # This host's own name, which is 127.0.1.1 here after the installers of Debian and Ubuntu. Other hosts find
            # one of its other addresses, and nothing tells which.
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", place[1]), family=family, backlog=MOST_STRANGERS, dualstack_ipv6=both)
        return socket.create_server(place, family=family, backlog=MOST_STRANGERS)
    listener = socket.socket(family)
    try:
        listener.bind(place)
        listener.listen(MOST_STRANGERS)
    except OSError:
        listener.close()
        raise
    return listener


def _name(member: _Member) -> str:
    return f"rank {member.rank} ({member.about})" if member.rank >= 0 else member.about


def _line(message: dict[str, Any]) -> bytes:
    return f"cmd={GATHERED} value={json.dumps(message)}\n".encode()


def _parse(line: bytes) -> tuple[str, Any]:
    """A command and its value. Raises ValueError for anything else."""
    head, _, value = line.partition(b" value=")
    try:
        return head.decode().removeprefix("cmd="), json.loads(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
