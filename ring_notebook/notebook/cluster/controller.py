"""ipyparallel's controller with its processes started in a safe order; a program of its own."""

from __future__ import annotations

from ipyparallel.controller.app import IPController

__all__ = ["Controller"]


class Controller(IPController):  # type: ignore[misc]
    """Forks before it has threads.

    ipyparallel starts its schedulers' threads and then forks the heart monitor. A lock that a thread holds at that
    moment stays locked in the child for ever: then no heart is heard, and no engine is ever registered.
    """

    def start(self) -> None:
        """Start everything, and serve until the process is ended."""
        monitor = self.heartmonitor_process
        monitor.start()
        monitor.start = lambda: None  # for `super().start`, which would start it a second time
        super().start()


if __name__ == "__main__":
    Controller.launch_instance()
