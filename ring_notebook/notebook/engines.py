"""Talks to the engines of a cluster: calls their functions, receives what these publish, sends signals."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import ipyparallel
from ipyparallel.serialize import deserialize_object

from ring_notebook.errors import ClusterError
from ring_notebook.protocol.question import CONTROL, QUESTIONS
from ring_notebook.protocol.records import RECORDS
from ring_notebook.protocol.registration import FORMATION
from ring_notebook.rank.named_interrupt import interrupt
from ring_notebook.text import words

_POLL = 0.02
_SECONDS_TO_HEAR = 1.0  # until the controller is asked, again, which engines have registered
_SECONDS_TO_JOIN = 0.25  # for a subscription to take effect, before engines publish again


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its rank is its index among the engines of the cluster."""

    rank: int
    host: str
    pid: int
    gpu: str = ""
    began: int = 0
    """When its process began, in clock ticks since its host booted; 0 if unknown."""
    threads: int = 0
    """How many threads it computes with, unless a cell sets another number; 0 if unknown."""
    replaced: float = 0.0
    """When it replaced an engine that died or was ended, in seconds since the epoch; 0 for the first one."""
    status_file: str = ""
    """The file on its host that says what it executes; empty without one."""
    reports: int = 0
    """How many failure reports of its rank belong to engines before it."""

    @property
    def local(self) -> bool:
        """Whether it runs on the kernel's host."""
        return self.host == socket.gethostname()


class Engines:
    """The engines behind an ipyparallel client. Every method may be called from any thread.

    ``trouble`` returns why no engine answers any more, empty while they do; ``deaths`` explains each death, by rank.
    ``end(rank, reason)`` kills an engine that can be started again; None if none can. ``interrupt_remote(rank, run)``
    interrupts a run on another host; None if ipyparallel does that, with a process for each engine.
    """

    def __init__(
        self,
        client: Any,
        trouble: Callable[[], str],
        deaths: Callable[[], Mapping[int, object]] = dict,
        end: Callable[[int, str], None] | None = None,
        interrupt_remote: Callable[[int, str], None] | None = None,
    ) -> None:
        self._client = client
        self.trouble = trouble
        self.deaths = deaths
        self.end = end
        self._interrupt_remote = interrupt_remote
        self.all: list[Engine] = []
        self._heard: set[int] = set()

    def part(self, ranks: Sequence[int]) -> Engines:
        """The engines of ``ranks``, numbered from 0 in this order. Its `close` closes all engines."""
        some = Engines(self._client, self.trouble, self.deaths, self.end, self._interrupt_remote)
        some.all = [self.all[rank] for rank in ranks]
        return some

    def wait_for(self, ranks: Sequence[int], timeout: float, trouble: Callable[[], str] = str) -> None:
        """Wait until the engines of ``ranks`` have registered.

        Raises ClusterError after ``timeout`` seconds, or with a text that ``trouble`` returns meanwhile.
        """
        deadline = monotonic() + timeout
        ask = monotonic() + _SECONDS_TO_HEAR
        while missing := set(ranks).difference(self._client.ids):
            if why := self.trouble() or trouble():
                raise ClusterError(why)
            if monotonic() > ask:
                ask = monotonic() + _SECONDS_TO_HEAR
                self._ask_who_is_there()
            if monotonic() > deadline:
                there = f"{len(ranks) - len(missing)} of {len(ranks)} engines registered within {timeout:g} s"
                raise ClusterError(
                    f"{there}, not {words.ranks(sorted(missing))}; RING_START_TIMEOUT sets how long to wait"
                )
            sleep(_POLL)

    def forget(self, rank: int, formation: int, timeout: float) -> None:
        """Have the controller and this client forget the engine of ``rank``, also one that has yet to register.

        The controller then refuses engines that were started before ``formation``. Raises ClusterError when the engine
        is not removed in time.
        """
        client = self._client
        self._heard.discard(rank)
        content = {"id": rank, FORMATION: formation}
        client._send(client._query_stream, "unregistration_request", content=content)
        deadline = monotonic() + timeout
        while rank in client.ids:
            if trouble := self.trouble():
                raise ClusterError(trouble)
            if monotonic() > deadline:
                raise ClusterError(
                    f"the controller has not removed engine {rank} within {timeout:g} s; try `%ring restart`"
                )
            sleep(_POLL)

    def _ask_who_is_there(self) -> None:
        """Ask the controller for all engines: it announces none to a client that is just subscribing."""
        client = self._client

        def update(reply: Any) -> None:
            client._update_engines(dict(reply.result()["content"]["engines"]))

        client._send(client._query_stream, "connection_request").add_done_callback(update)

    def submit(
        self,
        function: str,
        args: Sequence[Any],
        ranks: Sequence[int],
        on_records: Callable[[bytes], None] | None = None,
        on_question: Callable[[int, str], None] | None = None,
    ) -> list[Future[Any]]:
        """Call ``module:function`` on the engines of ``ranks``; what a rank returns is its future's result.

        ``on_records`` gets every message of records that the call publishes, and ``on_question`` every question with
        its rank, on ipyparallel's IO thread, where they must only enqueue. Raises ClusterError for an engine that the
        controller has lost.
        """

        def listen(rank: int) -> Callable[[Any], None]:
            handlers: dict[str, Callable[[Any], None]] = {}
            if on_records is not None:
                handlers[RECORDS] = on_records
            if on_question is not None:
                handlers[QUESTIONS] = lambda question: on_question(rank, question)
            # Before the message is sent: a callback added afterwards may miss the first answers.
            return lambda future: future.iopub_callbacks.append(lambda message: _hand_over(message, handlers))

        module, _, name = function.partition(":")
        reference = ipyparallel.Reference(f"__import__({module!r}, fromlist=[{name!r}]).{name}")
        client = self._client
        return [
            client.send_apply_request(
                # Through the stream that receives on this socket, not past it as ipyparallel does: a send clears
                # the socket's notification of what has just arrived, and answers then stay unread until the next.
                client._mux_stream,
                reference,
                list(args),
                ident=ident,
                metadata={"label": None},
                message_future_hook=listen(rank),
            )
            for rank, ident in zip(ranks, self._idents(ranks), strict=True)
        ]

    def submit_beside(self, function: str, args: Sequence[Any], ranks: Sequence[int]) -> list[Future[Any]]:
        """Call ``module:function`` on engines beside the cell that they execute; arguments and results are JSON.

        The result of a future is a message with the content ``{"result": ...}`` or ``{"error": text}``. An engine
        whose native code holds the interpreter answers when it has released it. Raises ClusterError for an engine that
        the controller has lost.
        """
        client = self._client
        content = {"function": function, "args": list(args)}
        return [
            client._send(client._control_stream, CONTROL, content=content, ident=ident) for ident in self._idents(ranks)
        ]

    def _idents(self, ranks: Sequence[int]) -> list[bytes]:
        try:
            return [self._client._engines[self._number(rank)].encode() for rank in ranks]
        except KeyError as error:
            raise ClusterError(f"the controller has lost the engine of rank {error}; try `%ring heal`") from None

    def call_beside(
        self, function: str, *args: Any, ranks: Sequence[int] | None = None, timeout: float = 2.0
    ) -> list[Any]:
        """Call ``module:function`` on engines beside the cells that they execute; None for those that do not answer.

        Raises ClusterError with the message of the first rank that raised.
        """
        wanted = range(len(self.all)) if ranks is None else ranks
        living = [rank for rank in self.living() if rank in wanted]
        futures = dict(zip(living, self.submit_beside(function, args, living), strict=True))
        deadline = monotonic() + timeout
        for future in futures.values():
            future.wait(max(0.0, deadline - monotonic()))  # type: ignore[attr-defined]
        contents = {rank: future.result()["content"] for rank, future in futures.items() if future.done()}
        for content in contents.values():
            if "error" in content:
                raise ClusterError(content["error"])
        return [contents.get(rank, {}).get("result") for rank in wanted]

    def call(
        self,
        function: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout: float = 60.0,
        trouble: Callable[[], str] = str,
    ) -> list[Any]:
        """Call ``module:function`` and return its results by rank.

        Raises ClusterError with the message of the first rank that raised, with a text that ``trouble`` returns
        meanwhile, or when there is no answer in time.
        """
        wanted = range(len(self.all)) if ranks is None else ranks
        self.require_living(wanted)
        futures = self.submit(function, args, wanted)
        deadline = monotonic() + timeout
        for future in futures:
            while not future.wait(_POLL):  # type: ignore[attr-defined]
                if why := self.trouble() or trouble():
                    raise ClusterError(why)
                self.require_living(wanted)
                if monotonic() > deadline:
                    raise ClusterError(f"no answer from the engines within {timeout:g} s; try `%ring restart`")
        results = [future.result() for future in futures]
        for error in results:
            if isinstance(error, ipyparallel.RemoteError):
                raise ClusterError(f"{error.ename}: {error.evalue}")
        return results

    def hear(self, ranks: Sequence[int], timeout: float = 10.0) -> None:
        """Wait until messages published by ``ranks`` arrive here; ranks heard before need no wait.

        Subscriptions between engine, controller and client take effect after they connect, and what is published before
        that is lost. Returns after ``timeout`` seconds in any case: an engine may be busy for longer.
        """
        deadline = monotonic() + timeout
        while (silent := [rank for rank in ranks if rank not in self._heard]) and monotonic() < deadline:
            futures: list[Any] = self.submit("os:getpid", (), silent)
            # ipyparallel ends `output` when the engine has published that it is idle again.
            until = monotonic() + _SECONDS_TO_JOIN
            self._heard.update(
                r for r, f in zip(silent, futures, strict=True) if f.output.wait(max(0.0, until - monotonic()))
            )

    def living(self) -> list[int]:
        """The ranks that have not died."""
        deaths = self.deaths()
        return [rank for rank, engine in enumerate(self.all) if engine.rank not in deaths]

    def known_to_controller(self) -> bool:
        """Whether the controller still knows one of them."""
        known = self._client.ids
        return any(engine.rank in known for engine in self.all)

    def require_living(self, ranks: Sequence[int]) -> None:
        """Raise ClusterError when one of ``ranks`` has died."""
        deaths = self.deaths()
        if dead := [rank for rank in (self._number(rank) for rank in ranks) if rank in deaths]:
            raise ClusterError(died(dead))

    def _number(self, rank: int) -> int:
        """The number in the cluster of ``rank`` of these engines."""
        return self.all[rank].rank if rank < len(self.all) else rank

    def signal(self, signum: signal.Signals, ranks: Sequence[int]) -> None:
        """Signal the living engines of ``ranks``, all on this host."""
        for engine in self._living(ranks):
            with suppress(ProcessLookupError):  # it has ended, and the watcher of the processes reports that
                os.kill(engine.pid, signum)

    def interrupt(self, name: str, ranks: Sequence[int]) -> None:
        """Send SIGINT to those engines of ``ranks`` that live and still execute ``name``: a run, or the debugger."""
        for engine in self._living(ranks):
            # An engine that has ended: the watcher of the processes reports it.
            with suppress(ProcessLookupError, IndexError, ipyparallel.NoEnginesRegistered, ClusterError):
                if engine.local:
                    interrupt(engine.pid, engine.status_file, name)
                elif self._interrupt_remote is not None:
                    self._interrupt_remote(engine.rank, name)
                else:
                    self._client.send_signal(signal.SIGINT, targets=engine.rank, block=False)

    def _living(self, ranks: Sequence[int]) -> Iterator[Engine]:
        deaths = self.deaths()
        # The process id of one that has died may be another's by now.
        return (engine for engine in (self.all[rank] for rank in ranks) if engine.rank not in deaths)

    def close(self) -> None:
        """Close the client's sockets."""
        self._client.close(linger=0)


def died(dead: Sequence[int]) -> str:
    """The error for a call on ranks that have died. Why they died was reported before."""
    have, them = ("has", "it") if len(dead) == 1 else ("have", "them")
    return f"{words.ranks(dead)} {have} died; `%ring heal` starts {them} again"


def _hand_over(message: dict[str, Any], handlers: Mapping[str, Callable[[Any], None]]) -> None:
    if message["header"]["msg_type"] != "data_message":
        return
    data, _ = deserialize_object(message["buffers"])
    for key, value in data.items():
        if key in handlers:
            handlers[key](value)
