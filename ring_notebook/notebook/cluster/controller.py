"""The program of a cluster's controller: ipyparallel's, encrypted, on reserved ports, without unsafe forks."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from secrets import token_hex
from types import SimpleNamespace
from typing import Any

from ring_notebook.machine.own_python import prepare_for_jupyter

gc.disable()  # until it serves: saves a tenth of the import time
prepare_for_jupyter()
from ipyparallel.controller import app, heartmonitor, hub  # noqa: E402

from ring_notebook.launch.supervisor.parent_death import bind_to_parent  # noqa: E402
from ring_notebook.protocol.registration import FORMATION, REPLACED, used_up  # noqa: E402


class Hub(hub.Hub):  # type: ignore[misc]
    """Gives every engine the number that it asks for, which is its rank.

    ipyparallel gives another number while an engine has this one, and for 30 s after an engine has asked for it and
    sent no heartbeat. So a dead engine would block the number of its replacement, and callers would not find that one.
    Here the engine with the latest first heartbeat has the number. The one before is unregistered, and its callers get
    an error.

    When a lost host comes back, its engines are refused and end if engines of a later formation have their numbers.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._least: dict[int, int] = {}  # by number: the earliest formation that may have it

    def register_engine(self, reg: list[bytes], msg: dict[str, Any]) -> int | None:
        """Begin the registration of an engine, unless another was started in its place."""
        number = msg["content"].get("id")
        if msg["metadata"].get(FORMATION, 0) < self._least.get(number, 0):
            self._refuse(reg, number)
            return None
        eid: int | None = super().register_engine(reg, msg)
        return eid

    def unregister_engine(self, ident: list[bytes], msg: dict[str, Any]) -> None:
        """Forget an engine, and tell it when another is started in its place."""
        number, formation = msg["content"].get("id"), msg["content"].get(FORMATION)
        if formation is not None:
            self._least[number] = formation
            known = [self.engines[number]] if number in self.engines else []
            for engine in [*known, *self.incoming_registrations.values()]:
                if engine.id == number:
                    self._refuse(engine.ident, number)
        super().unregister_engine(ident, msg)

    def _refuse(self, engine: list[bytes] | bytes, number: int) -> None:
        why = f"rank {number} was started again elsewhere while this engine could not be reached: this one ends"
        self.log.info(f"registration::refusing engine {number}: another was started in its place")
        content = {"status": "error", "ename": REPLACED, "evalue": why}
        self.session.send(self.query, "registration_reply", content=content, ident=engine)

    def new_engine_id(self, requested_id: int | None = None) -> int:
        """The number of an engine that registers."""
        free: int = super().new_engine_id(requested_id)
        return free if requested_id is None else requested_id

    def finish_registration(self, heart: bytes) -> None:
        """Register the engine whose first heartbeat has come, in place of one that has its number."""
        engine = self.incoming_registrations.get(heart)
        if engine is not None and engine.id in self.engines:
            self.unregister_engine([heart], {"content": {"id": engine.id}})
        super().finish_registration(heart)


class HeartMonitor(heartmonitor.HeartMonitor):  # type: ignore[misc]
    """Tells the hub of a new engine at its first heartbeat. ipyparallel does so with the next ping, a period later."""

    def handle_pong(self, msg: list[bytes]) -> None:
        """Take note of the heartbeat ``msg`` of an engine."""
        super().handle_pong(msg)
        if new := self.responses.difference(self.hearts):
            self.handle_new_hearts(new)


class Controller(app.IPController):  # type: ignore[misc]
    """Encrypts and signs every message, keeps its files private, and forks before it has threads.

    All sockets speak CURVE: a client or an engine needs the controller's public key, which only the connection files
    hold, and nobody else can connect or read.

    ipyparallel starts its schedulers' threads and then forks the heart monitor. A lock that a thread holds at that
    moment stays locked in the child for ever: then no heart is heard, and no engine is ever registered.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: list[socket.socket] = []
        self._left: dict[str, Iterator[int]] = {}
        self._warned = False

    def initialize(self, argv: Any = None) -> None:
        """Read the options and bind the sockets."""
        os.umask(0o077)
        self.config.Session.key = token_hex().encode()  # else ipyparallel signs nothing, and warns of that
        self.enable_curve = True
        super().initialize(argv)

    def init_hub(self) -> None:
        """Make the hub, where engines register, and the heart monitor, which `start` starts."""
        controller = os.getpid()

        def monitor_hearts(**options: Any) -> None:
            bind_to_parent(controller, signal.SIGKILL)  # a killed controller would leave it behind
            heartmonitor.start_heartmonitor(**options)

        app.Hub, app.start_heartmonitor = Hub, monitor_hearts
        heartmonitor.HeartMonitor = HeartMonitor
        # ipyparallel sleeps for 0.25 s before it says where the hub is, though nothing that it waits for has started.
        app.time = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
        super().init_hub()

    def next_port(self, pool_name: str = "common") -> int:
        """A port for a scheduler, which is another process; nobody else can take it before the scheduler binds it.

        It comes from ipyparallel's options ``engine_ports`` and ``client_ports``, then ``ports``; ports in use are
        passed over. When these are used up it is any free port, with a warning.
        """
        pools = {"engine": self.engine_ports, "client": self.client_ports, "common": self.ports}
        for name in dict.fromkeys((pool_name, "common")):
            for port in self._left.setdefault(name, iter(pools[name])):
                with suppress(OSError, OverflowError):
                    return self._reserved(port)
        given = sum(map(len, pools.values()))
        if given and not self._warned:
            self._warned = True
            self.log.warning(used_up(given))
        return self._reserved(0)

    def _reserved(self, port: int) -> int:
        """Reserve ``port``, 0 for any, by a bound socket that does not listen.

        ZeroMQ can still bind it, because both set SO_REUSEADDR. Raises OSError.
        """
        held = socket.socket()
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", port))
        except OSError:
            held.close()
            raise
        self._held.append(held)
        return int(held.getsockname()[1])

    def start(self) -> None:
        """Start everything, and serve until the process is ended."""
        gc.freeze()  # the monitor, which is a fork, shares these pages
        gc.enable()
        monitor = self.heartmonitor_process
        monitor.start()
        monitor.start = lambda: None  # for `super().start`, which would start it a second time
        super().start()


if __name__ == "__main__":
    Controller.launch_instance()
