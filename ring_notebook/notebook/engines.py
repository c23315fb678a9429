"""Talks to the engines of a cluster: calls their functions, receives what these publish, sends signals."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import ipyparallel
from ipyparallel.serialize import deserialize_object

from ring_notebook.errors import ClusterError
from ring_notebook.question import CONTROL, QUESTIONS
from ring_notebook.records import RECORDS

__all__ = ["Engine", "EngineStatus", "Engines"]

_POLL = 0.02
_SECONDS_TO_HEAR = 1.0  # of engines that register, until the controller is asked for them


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its rank is its index among the engines of the cluster."""

    rank: int
    host: str
    pid: int
    gpu: str = ""

    @property
    def local(self) -> bool:
        """Whether it runs on the kernel's host."""
        return self.host == socket.gethostname()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What one engine is doing. ``gpu`` is empty without a GPU, ``run`` when it is idle."""

    rank: int
    host: str
    pid: int
    gpu: str
    run: str


class Engines:
    """The engines behind an ipyparallel client. Every method may be called from any thread."""

    def __init__(self, client: Any, trouble: Callable[[], str]) -> None:
        self._client = client
        self.trouble = trouble  # why the engines answer no more; empty while they do
        self.all: list[Engine] = []

    def part(self, ranks: Sequence[int]) -> Engines:
        """Some of the engines, which count from 0 in this order. `close` is for all of them."""
        some = Engines(self._client, self.trouble)
        some.all = [self.all[rank] for rank in ranks]
        return some

    def wait_for(self, n: int, timeout: float) -> None:
        """Wait until ``n`` engines have registered. Raises ClusterError when they have not."""
        deadline = monotonic() + timeout
        ask = monotonic() + _SECONDS_TO_HEAR
        while len(self._client.ids) < n:
            if trouble := self.trouble():
                raise ClusterError(trouble)
            if monotonic() > ask:
                ask = monotonic() + _SECONDS_TO_HEAR
                self._ask_who_is_there()
            if monotonic() > deadline:
                raise ClusterError(f"{len(self._client.ids)} of {n} engines registered within {timeout:g} s")
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
        its rank, on ipyparallel's IO thread, where they must only enqueue.
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
                ident=client._engines[self.all[rank].rank if self.all else rank].encode(),
                metadata={"label": None},
                message_future_hook=listen(rank),
            )
            for rank in ranks
        ]

    def submit_beside(self, function: str, args: Sequence[Any], ranks: Sequence[int]) -> list[Future[Any]]:
        """Call ``module:function`` on engines beside the cell that they execute; arguments and results are JSON.

        The result of a future is a message with the content ``{"result": ...}`` or ``{"error": text}``. An engine
        whose native code holds the interpreter answers when it has released it.
        """
        client = self._client
        content = {"function": function, "args": list(args)}
        return [
            client._send(client._control_stream, CONTROL, content=content, ident=client._engines[engine.rank].encode())
            for engine in (self.all[rank] for rank in ranks)
        ]

    def call_beside(
        self, function: str, *args: Any, ranks: Sequence[int] | None = None, timeout: float = 2.0
    ) -> list[Any]:
        """Call ``module:function`` on engines beside the cells that they execute; None for those that are silent.

        Raises ClusterError with the message of the first rank that raised.
        """
        futures = self.submit_beside(function, args, range(len(self.all)) if ranks is None else ranks)
        deadline = monotonic() + timeout
        for future in futures:
            future.wait(max(0.0, deadline - monotonic()))  # type: ignore[attr-defined]
        contents = [future.result()["content"] if future.done() else {} for future in futures]
        for content in contents:
            if "error" in content:
                raise ClusterError(content["error"])
        return [content.get("result") for content in contents]

    def call(self, function: str, *args: Any, ranks: Sequence[int] | None = None, timeout: float = 60.0) -> list[Any]:
        """Call ``module:function`` and return its results by rank.

        Raises ClusterError with the message of the first rank that raised, or when there is no answer in
        time.
        """
        wanted = range(len(self.all)) if ranks is None else ranks
        futures = self.submit(function, args, wanted)
        deadline = monotonic() + timeout
        for future in futures:
            while not future.wait(_POLL):  # type: ignore[attr-defined]
                if trouble := self.trouble():
                    raise ClusterError(trouble)
                if monotonic() > deadline:
                    raise ClusterError(f"no answer from the engines within {timeout:g} s; try `%ring restart`")
        results = [future.result() for future in futures]
        for error in results:
            if isinstance(error, ipyparallel.RemoteError):
                raise ClusterError(f"{error.ename}: {error.evalue}")
        return results

    def signal(self, signum: signal.Signals, ranks: Sequence[int]) -> None:
        """Signal the engines of ``ranks``: directly on this host, through their nannies elsewhere."""
        for engine in (self.all[rank] for rank in ranks):
            try:
                if engine.local:
                    os.kill(engine.pid, signum)
                else:
                    self._client.send_signal(signum, targets=engine.rank, block=False)
            except (ProcessLookupError, IndexError, ipyparallel.NoEnginesRegistered):
                continue  # it has ended, and the watcher of the processes reports that

    def close(self) -> None:
        """Close the client's sockets."""
        self._client.close(linger=0)


def _hand_over(message: dict[str, Any], handlers: Mapping[str, Callable[[Any], None]]) -> None:
    if message["header"]["msg_type"] != "data_message":
        return
    data, _ = deserialize_object(message["buffers"])
    for key, value in data.items():
        if key in handlers:
            handlers[key](value)
