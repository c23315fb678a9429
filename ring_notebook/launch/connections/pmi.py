"""PMI-1, the protocol through which the ranks of MPICH find each other, as a server without sockets of its own.

Each rank has an inherited socket, on which it sends lines such as ``cmd=get kvsname=ring key=K``. Nothing listens. Our
own commands begin with ``ring_``: by them ranks find each other without MPI.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from ring_notebook.rank.rendezvous_server import ASSEMBLE, GATHER, GATHERED, GIVE_UP, Gathering, Replies

_LONGEST_LINE = 1 << 16  # bytes: keys and values have at most 64 and 1024
_LONGEST_MAPPING = 900  # bytes: a client takes lines of 1024
_MAXES = "kvsname_max=256 keylen_max=64 vallen_max=1024"


def variables(rank: int, size: int, descriptor: int) -> dict[str, str]:
    """The variables that make a process rank ``rank`` of ``size``; it must inherit ``descriptor``."""
    return {"PMI_FD": str(descriptor), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}


def shared_memory_prefixes(job: str) -> tuple[str, str]:
    """How the names begin that MPICH gives to its files in /dev/shm; it derives them from the name of the job."""
    code = 0x811C9DC5  # FNV-1a
    for byte in job.encode():
        code = (code ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"mpich_shm_{code:x}_", f"mpich_vci_{code:x}_"


def process_mapping(places: Sequence[int]) -> str:
    """Which ranks share a host, as PMI writes it, from the number of each rank's host by rank.

    Each block is the first host, how many hosts follow one another with as many ranks each, and these ranks:
    ``[0, 0, 1, 1]`` gives ``(vector,(0,2,2))``. Empty when it is longer than a line of PMI; MPICH then asks its ranks.
    """
    blocks: list[list[int]] = []
    for place, ranks in groupby(places):
        count = len(list(ranks))
        if blocks and blocks[-1][2] == count and blocks[-1][0] + blocks[-1][1] == place:
            blocks[-1][1] += 1
        else:
            blocks.append([place, 1, count])
    text = f"(vector,{','.join(f'({first},{hosts},{ranks})' for first, hosts, ranks in blocks)})"
    return text if len(text) <= _LONGEST_MAPPING else ""


class PmiServer:
    """Answers the ranks of ``job``, a name that no other job of their hosts has; ``places`` as `process_mapping`."""

    def __init__(self, job: str, places: Sequence[int], elastic: bool = False) -> None:
        size = len(places)
        self.initialized: set[int] = set()
        self.finalized: set[int] = set()
        self.aborted: dict[int, int] = {}
        """Exit codes of ranks that have called MPI_Abort; these wait to be killed, with all others."""
        self._job = job
        self._size = size
        mapping = process_mapping(places)
        self._values = {"PMI_process_mapping": mapping} if mapping else {}
        self._at_barrier: set[int] = set()
        self._unread = dict.fromkeys(range(size), b"")
        self._in_spawn: set[int] = set()
        self.gathering = Gathering(size, elastic)
        """What the ranks have told each other without MPI."""

    def receive(self, rank: int, data: bytes) -> dict[int, bytes]:
        """Take what ``rank`` has sent; returns what to send to which ranks.

        Raises ValueError when it does not speak PMI-1.
        """
        *lines, rest = (self._unread[rank] + data).split(b"\n")
        self._unread[rank] = rest
        if max(map(len, (*lines, rest))) > _LONGEST_LINE:
            raise ValueError(f"rank {rank}: a PMI line of more than {_LONGEST_LINE} bytes")
        replies: dict[int, bytes] = {}
        for line in lines:
            answers = self._answer(rank, line.decode("utf-8", "surrogateescape"))
            # Thousands of ranks may get one long answer: they share its bytes.
            sent = {text: text.encode("utf-8", "surrogateescape") + b"\n" for text in set(answers.values())}
            for to, text in answers.items():
                replies[to] = replies[to] + sent[text] if to in replies else sent[text]
        return replies

    def _answer(self, rank: int, line: str) -> dict[int, str]:
        """The replies to one line, by rank."""
        # A value is the last field and may have spaces and equal signs in it.
        head, _, value = line.partition(" value=")
        fields = dict(word.split("=", 1) for word in head.split() if "=" in word)
        command = fields.get("cmd", "")
        if rank in self._in_spawn or "mcmd" in fields:
            return self._refuse_spawn(rank, line)
        if command == "barrier_in":
            self._at_barrier.add(rank)
            if len(self._at_barrier) < self._size:
                return {}
            self._at_barrier.clear()
            return dict.fromkeys(range(self._size), "cmd=barrier_out rc=0")
        if command in (GATHER, ASSEMBLE):
            take = self.gathering.take if command == GATHER else self.gathering.assemble
            try:
                return _answers(take(rank, json.loads(value)))
            except RecursionError as error:
                raise ValueError(f"rank {rank}: nested too deeply") from error
        if command == GIVE_UP:
            return _answers(self.gathering.give_up(rank))
        if command == "abort":
            self.aborted[rank] = _abort_code(fields.get("exitcode", ""))
            return {}
        return {rank: self._reply(rank, command, fields, value)}

    def _reply(self, rank: int, command: str, fields: dict[str, str], value: str) -> str:
        key = fields.get("key", "")
        if command == "init":
            self.initialized.add(rank)
            return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        if command == "finalize":
            self.finalized.add(rank)
            return "cmd=finalize_ack rc=0"
        if command == "put":
            self._values[key] = value
            return "cmd=put_result rc=0 msg=success"
        if command == "get":
            if key in self._values:
                return f"cmd=get_result rc=0 msg=success value={self._values[key]}"
            return "cmd=get_result rc=-1 msg=key_not_found"
        constants = {
            "get_maxes": f"cmd=maxes {_MAXES} rc=0",
            "get_appnum": "cmd=appnum appnum=0 rc=0",
            "get_my_kvsname": f"cmd=my_kvsname kvsname={self._job} rc=0",
            "get_universe_size": f"cmd=universe_size size={self._size} rc=0",
        }
        return constants.get(command, f"cmd={command or 'unknown'}_result rc=-1 msg=not_supported")

    def started(self, rank: int) -> None:
        """A process is ``rank`` from now on."""
        self._unread[rank] = b""
        self.gathering.started_again(rank)

    def _refuse_spawn(self, rank: int, line: str) -> dict[int, str]:
        """MPI_Comm_spawn sends several lines up to ``endcmd``; the size of a job is fixed."""
        self._in_spawn.add(rank)
        if line.strip() != "endcmd":
            return {}
        self._in_spawn.discard(rank)
        return {rank: "cmd=spawn_result rc=-1 status=1"}


def lines(replies: Replies) -> dict[int, bytes]:
    return {to: f"{line}\n".encode() for to, line in _answers(replies).items()}


def _answers(replies: Replies) -> dict[int, str]:
    # All ranks of a gathering get the same reply, with all values.
    texts = {id(reply): reply for reply in replies.values()}
    written = {number: f"cmd={GATHERED} value={json.dumps(reply)}" for number, reply in texts.items()}
    return {to: written[id(reply)] for to, reply in replies.items()}


def _abort_code(text: str) -> int:
    """The exit code that a rank asks for, in a process's 8 bits; 1 where these would mean success."""
    try:
        return int(text) & 0xFF or 1
    except ValueError:
        return 1
