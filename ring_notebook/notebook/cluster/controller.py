"""ipyparallel's controller, encrypted and with its processes started in a safe order; a program of its own."""

from __future__ import annotations

import os
from secrets import token_hex
from typing import Any

from ipyparallel.controller.app import IPController

__all__ = ["Controller"]


class Controller(IPController):  # type: ignore[misc]
    """Encrypts and signs every message, keeps its files private, and forks before it has threads.

    All sockets speak CURVE: a client or an engine needs the controller's public key, which stands only in the
    connection files, and nobody else can connect or read.

    ipyparallel starts its schedulers' threads and then forks the heart monitor. A lock that a thread holds at that
    moment stays locked in the child for ever: then no heart is heard, and no engine is ever registered.
    """

    def initialize(self, argv: Any = None) -> None:
        """Read the options and bind the sockets."""
        os.umask(0o077)
        self.config.Session.key = token_hex().encode()  # else ipyparallel signs nothing, and warns of that
        self.enable_curve = True
        super().initialize(argv)

    def start(self) -> None:
        """Start everything, and serve until the process is ended."""
        monitor = self.heartmonitor_process
        monitor.start()
        monitor.start = lambda: None  # for `super().start`, which would start it a second time
        super().start()


if __name__ == "__main__":
    Controller.launch_instance()
