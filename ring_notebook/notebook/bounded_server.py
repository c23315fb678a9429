"""What servers in the kernel of a notebook share: a few callers at once, each answered in a thread."""

from __future__ import annotations

import socketserver
from threading import BoundedSemaphore
from typing import Any


class BoundedServer(socketserver.ThreadingMixIn):
    """Before a class of servers: answers at most ``most`` callers at once, and turns others away."""

    most: int
    daemon_threads = True
    block_on_close = False  # a caller that sends nothing, or waits, must not hold the notebook

    def __init__(self, *arguments: Any) -> None:
        self._places = BoundedSemaphore(self.most)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[attr-defined]
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing in the notebook: a caller that hangs up is not an error of its user."""
