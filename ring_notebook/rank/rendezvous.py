"""The one rendezvous: every rank gives a value, and gets what all ranks have given, by rank.

A rank speaks to a server through one of two doors: a socket that it inherits from our supervisor, where MPI's PMI goes
too, or an address and a secret (`RENDEZVOUS`, `SECRET`) that any process can be given. The third door is MPI's own
allgather (`ring_notebook.core.place`). A line ``cmd=ring_gather value=JSON`` holds the request, a line
``cmd=ring_gathered value=JSON`` the answer; `ring_notebook.rank.rendezvous_server` has the other side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ring_notebook.analysis.time_limits import RENDEZVOUS_LIMIT
from ring_notebook.config import config
from ring_notebook.errors import CollectiveTimeout, RingError
from ring_notebook.machine.os_calls import namespace, peer_of
from ring_notebook.rank.rank_variables import STARTED_AGAIN
from ring_notebook.rank.rendezvous_server import (
    ACCEPTED,
    ASSEMBLE,
    GATHER,
    GATHERED,
    GIVE_UP,
    JOIN,
    RENDEZVOUS,
    SECRET,
    RendezvousServer,
    resolve,
)
from ring_notebook.rank.secure_streams import tls_of_secret

RANK, SIZE = "RING_RANK", "RING_SIZE"
SECRET_FILE = f"{SECRET}_FILE"
_TAKEN = f"{RENDEZVOUS}_TAKEN"
"""Set to what a process has taken part in, so that its children do not."""
JOB = (RANK, SIZE, RENDEZVOUS, SECRET, SECRET_FILE, _TAKEN)
"""The variables that make a process a rank of a job."""
_SECONDS_TO_ANSWER = 10.0
_PAUSE = 0.05
_CAPACITY = 1 << 16
_SHORTEST = 16  # characters of a secret; a shorter one could be found by trying all


def variables(rank: int, size: int, descriptor: int) -> dict[str, str]:
    """The variables that make a process rank ``rank`` of ``size``; it must inherit the socket ``descriptor``."""
    return {RANK: str(rank), SIZE: str(size), RENDEZVOUS: str(descriptor)}


def is_offered(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables name a rendezvous at an address that this process has not taken part in."""
    where = env.get(RENDEZVOUS, "")
    return bool(where) and not where.isdigit() and env.get(_TAKEN) != _mark(where, env)


class FormationError(RingError):
    """A member has exited, or cannot form. In an elastic job the living ranks assemble, and form again."""


class Assembled(NamedTuple):
    """The next generation of an elastic job, and its members, once they have assembled.

    If processes have joined, all form first, in ``formation`` of a job of ``size`` ranks; 0 if none has joined.
    """

    generation: int
    members: list[int]
    formation: int
    size: int


class Rendezvous:
    """A rank's side. ``rank`` and ``size`` are those of the job."""

    def __init__(self, channel: socket.socket, rank: int, size: int, where: str = "") -> None:
        self.rank = rank
        self.size = size
        self.host = this_host()
        """Equal on all ranks of this host, and on no others."""
        self.members: tuple[int, ...] = tuple(range(size))
        """The ranks that gather."""
        self.key = b""
        """A secret of these ranks, once they have gathered something."""
        self.elastic = False
        """Whether the job continues without ranks that die; known once they have gathered something."""
        self.has_mpi = False
        """Whether MPI.COMM_WORLD has the same ranks."""
        self.joins = False
        """Whether this rank joins an elastic job whose other ranks have formed without it."""
        self._updated = False  # processes wait to be admitted
        self._channel = channel
        self._where = where  # the address of the server; empty where our supervisor serves
        self._server: RendezvousServer | None = None  # where this process serves
        self._address = ""  # of this host, where the server has told it
        self.formation = 0
        """The number of the formation that this rank began last."""
        self._step = 0
        self._unread = b""
        self._limit = self._deadline = math.inf

    @classmethod
    def take(cls, env: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """The rendezvous that this process is to take part in; None when there is none.

        After `formed` there is none for it and its children. Raises RingError when it has not inherited the socket,
        when there is no such server, when that does not know the secret, and when the other ranks do not come.
        """
        where = env.get(RENDEZVOUS, "")
        if where and not where.isdigit():
            return cls._join(where, _secret(env), *_numbers(env)) if is_offered(env) else None
        if "TORCHELASTIC_RUN_ID" in env:  # started within a rank of ours, or without any
            name = _name_of_torchrun(env)
            if not name or env.get(_TAKEN) == _mark(name, env):
                return None
            return cls._join(name, name.encode(), int(env["RANK"]), int(env["WORLD_SIZE"]))
        return cls._inherit(int(where), env) if where.isdigit() else None

    @classmethod
    def _inherit(cls, descriptor: int, env: Mapping[str, str]) -> Rendezvous:
        rank = int(env[RANK])
        try:
            channel = socket.socket(fileno=os.dup(descriptor))  # MPI has the other one
        except OSError as error:
            raise RingError(
                f"rank {rank} failed to initialize: the socket to its supervisor, descriptor {descriptor}, is closed "
                f"({error.strerror}); a program between ringrun and this one has closed it: start this one with "
                "`exec`, or with close_fds=False"
            ) from None
        made = cls(channel, rank, int(env[SIZE]))
        made.has_mpi = "PMI_FD" in env
        made.joins = STARTED_AGAIN in env and "RING_MIN_NP" in env
        return made

    @classmethod
    def _join(cls, where: str, secret: bytes, rank: int | None, size: int | None) -> Rendezvous:
        limit = config().start_limit(RENDEZVOUS_LIMIT)
        deadline = time.monotonic() + limit
        server = _serve(where, secret, size) if rank == 0 and size else None
        channel: socket.socket | None = None
        try:
            channel = _connect(where, secret, limit, deadline, _name(rank))
            made = cls(channel, -1 if rank is None else rank, size or 0, where)
            made._limit, made._deadline, made._server = limit, deadline, server
            found = made._ask(JOIN, {"rank": rank, "size": size, "host": made.host, "about": _name(None)})
            number, count = found.get("rank"), found.get("size")
            if not isinstance(number, int) or not isinstance(count, int):
                raise made._error(f"expected a rank, got {found!r:.100}")
            made.rank, made.size, made._address = number, count, str(found.get("address", ""))
            made.members = tuple(range(made.size))
            made._deadline = time.monotonic() + limit
        except BaseException:
            if channel is not None:
                channel.close()
            if server is not None:
                server.close()
            raise
        return made

    @property
    def address(self) -> str:
        """The address of this host on the way to the server, or to other hosts if it serves; empty if unknown."""
        if self._address:
            return self._address
        return str(self._channel.getsockname()[0]) if self._channel.family != socket.AF_UNIX else ""

    def begin(self, formation: int, members: Sequence[int], size: int = 0) -> None:
        """Gather among ``members`` from now on, all of which begin with the same, greater ``formation``.

        The job has ``size`` ranks then, or as many as before.
        """
        self.formation, self._step, self.members = formation, 0, tuple(members)
        if size not in (0, self.size):
            self.size, self.has_mpi = size, False  # MPI keeps the ranks that it began with

    def gather(self, value: Any, last: bool = False) -> list[Any]:
        """What all `members` have given, by rank; None for others. JSON can hold each ``value``.

        Collective over the members; ``last`` says that they form with it. Raises RingError when one of them has exited
        instead. May be interrupted.
        """
        members = list(self.members) if len(self.members) < self.size else None
        request = {"formation": self.formation, "step": self._step, "members": members, "last": last, "value": value}
        answer = self._ask(GATHER, request)
        values, key = answer.get("values"), answer.get("key")
        if not isinstance(values, list) or len(values) != self.size or not isinstance(key, str):
            raise self._error(f"expected what {self.size} ranks have given, got {values!r:.100}")
        self._step += 1
        self.key = key.encode(errors="replace")
        self.elastic = answer.get("elastic") is True
        return values

    def assemble(self, ranks: Sequence[int], generation: int, limit: float) -> Assembled:
        """The next generation of an elastic job: its members are the living ones of ``ranks``, and processes that join.

        Each of them calls this with the newest ``generation`` that it has tried to open; one that joins names no
        ``ranks``. Raises CollectiveTimeout when some have not called within ``limit`` seconds (0: waits for any time),
        and RingError when the supervisor has exited. May be interrupted.
        """
        self._limit, self._deadline = limit, time.monotonic() + limit if limit else math.inf
        try:
            found = self._ask(ASSEMBLE, {"ranks": list(ranks), "generation": generation})
        finally:
            self._deadline = math.inf
        if "missing" in found:
            names = ", ".join(f"rank {one}" for one in found["missing"])
            raise CollectiveTimeout(
                f"rank {self.rank} waited {limit:g} s for {names} to join the next generation (RING_TIMEOUT)"
            )
        self._updated = False  # the waiting processes have been admitted
        number, members = int(found["next"]), list(found["members"])
        if "forms" in found:  # joined processes come last: the others send them their state
            return Assembled(number, members, *found["forms"])
        return Assembled(number, [one for one in ranks if one in members], 0, self.size)

    def is_updated(self) -> bool:
        """Whether processes that came after this rank's last assembly wait for the next one."""
        if not self._updated and self.elastic:
            with contextlib.suppress(OSError):  # nothing has come
                self._unread += self._channel.recv(_CAPACITY, socket.MSG_DONTWAIT)
            # The news may have come with the last answer.
            *lines, self._unread = self._unread.split(b"\n")
            self._updated = any(b'"updated"' in line for line in lines)
        return self._updated

    def formed(self) -> None:
        """The ranks have found each other. A supervisor stays connected; any other server is left."""
        if self._where:
            os.environ[_TAKEN] = _mark(self._where, os.environ)
            self.close()
        else:
            os.environ.pop(RENDEZVOUS, None)

    def close(self) -> None:
        """Gather nothing more."""
        self._channel.close()
        if self._server is not None:
            self._server.close()

    def _ask(self, command: str, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] | None = None
        kind: type[RingError] = FormationError
        try:
            self._channel.settimeout(None)
            self._channel.sendall(f"cmd={command} value={json.dumps(request)}\n".encode())
            while answer is None:
                found = self._read_answer()
                if "updated" in found:
                    self._updated = True
                    continue
                echoed = {name: found[name] for name in ("formation", "step", "generation") if name in found}
                if echoed.items() <= request.items():  # else it answers an interrupted request
                    answer = found
        except (OSError, RecursionError, ValueError):
            gone = (
                f"the rendezvous at {self._where} has ended"
                if self._where
                else "the supervisor of the ranks has exited"
            )
            answer, kind = {"error": gone}, RingError
        if "error" in answer:
            raise self._error(str(answer["error"]), kind)
        return answer

    def _error(self, why: str, kind: type[RingError] = RingError) -> RingError:
        return kind(f"{_name(self.rank)} failed to initialize: {why}")

    def _read_answer(self) -> dict[str, Any]:
        line = self._read_line()
        if not line.startswith(f"cmd={GATHERED} value=".encode()):
            raise ValueError("no answer to a gathering")
        answer = json.loads(line.partition(b" value=")[2])
        if not isinstance(answer, dict):
            raise ValueError("no answer to a gathering")
        return answer

    def _read_line(self) -> bytes:
        while b"\n" not in self._unread:
            left = self._deadline - time.monotonic()
            if left <= 0:  # the server says who has not come
                self._channel.sendall(f"cmd={GIVE_UP} value={json.dumps(self._limit)}\n".encode())
                self._deadline = math.inf
                left = _SECONDS_TO_ANSWER
            self._channel.settimeout(None if left == math.inf else left)
            try:
                piece = self._channel.recv(_CAPACITY)
            except TimeoutError:
                if self._deadline == math.inf:
                    raise
                continue
            if not piece:
                raise ValueError("the server has closed the connection")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _serve(where: str, secret: bytes, size: int) -> RendezvousServer | None:
    """Rank 0 serves, unless the address is another host's or another process serves there."""
    try:
        return RendezvousServer(size, where, secret.decode())
    except OSError:
        return None


def _connect(where: str, secret: bytes, limit: float, deadline: float, who: str) -> socket.socket:
    """A connection to the server, which has proven that it knows the secret, as has this process."""
    tls = None if where.startswith("@") else tls_of_secret(secret, server=False)
    while True:
        channel = None
        try:
            family, place = resolve(where)
            channel = socket.socket(family, socket.SOCK_STREAM)
            channel.settimeout(_SECONDS_TO_ANSWER)
            channel.connect(place)
            if tls is not None:
                channel = tls.wrap_socket(channel)
            elif peer_of(channel)[1] != os.getuid():
                raise RingError(f"{who} failed to initialize: a process of another user has taken the name of the job")
            if channel.recv(len(ACCEPTED)) == ACCEPTED:
                return channel
            why = "it answers no rendezvous"
        except ssl.SSLCertVerificationError:
            raise RingError(
                f"{who} failed to initialize: the server at {where} does not know the secret of this process; "
                f"{SECRET} must be the same for the server and all ranks"
            ) from None
        except OSError as error:  # nobody listens there yet, or not any more
            why = error.strerror or str(error)
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        if channel is not None:
            channel.close()
        if time.monotonic() > deadline:
            raise RingError(
                f"{who} failed to initialize: expected a rendezvous at {where} within {limit:g} s, got none ({why}); "
                "call init() on rank 0, which serves if no driver does, and not in processes that a rank starts"
            )
        time.sleep(_PAUSE)


def _name(rank: int | None) -> str:
    return f"process {os.getpid()} on {socket.gethostname()}" if rank is None or rank < 0 else f"rank {rank}"


def _numbers(env: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Rank and size where the variables give them, ours or else torchrun's."""
    names = (RANK, SIZE) if RANK in env or SIZE in env else ("RANK", "WORLD_SIZE")
    rank, size = (int(env[name]) if env.get(name, "").isdigit() else None for name in names)
    return rank, size


def _secret(env: Mapping[str, str]) -> bytes:
    """The secret of the rendezvous. Raises RingError when there is none, or others can read it."""
    secret = env.get(SECRET, "")
    path = env.get(SECRET_FILE, "")
    if not secret and path:
        try:
            with Path(path).open() as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                secret = file.read().strip()
        except (OSError, ValueError) as error:
            raise RingError(f"{SECRET_FILE}={path}: the secret of the rendezvous cannot be read ({error})") from None
        if mode & 0o077:
            raise RingError(
                f"{SECRET_FILE}={path}: expected a file that only its owner can read, got mode {mode:o}; `chmod 600` it"
            )
    if len(secret) < _SHORTEST:
        raise RingError(
            f"{RENDEZVOUS}={env[RENDEZVOUS]}: expected a secret of at least {_SHORTEST} characters in {SECRET}, or in "
            f"the file that {SECRET_FILE} names, got {len(secret)}; "
            "`python -c 'import secrets; print(secrets.token_hex())'` makes one"
        )
    return secret.encode()


def _mark(where: str, env: Mapping[str, str]) -> str:
    """Identifies a rendezvous, without its secret."""
    text = "\0".join((where, env.get(SECRET, ""), env.get(SECRET_FILE, "")))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _name_of_torchrun(env: Mapping[str, str]) -> str:
    """Where ranks that torchrun has started on one host meet; empty for several hosts.

    The name is in Linux's abstract namespace: no file and no port; processes of other users are refused. Ranks of one
    start have the same parent; a restart has another count.
    """
    if env.get("GROUP_WORLD_SIZE") != "1":
        return ""
    job = f"{os.getppid()}-{env['TORCHELASTIC_RUN_ID']}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # Digested, because the name of a socket has 107 bytes, and a user chooses the id of the run.
    name = hashlib.blake2b(job.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return f"@ring-notebook-{os.getuid()}-{name}"


def this_host() -> str:
    """Equal for processes that can share memory: the machine, and namespaces of processes and networks."""
    facts = [socket.gethostname(), *map(namespace, ("pid", "net"))]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
