"""What servers in the kernel of a notebook share: they serve beside its cells, a few callers at once."""

from __future__ import annotations

import atexit
import socketserver
from threading import BoundedSemaphore, Thread
from typing import Any

_PERIOD = 0.2  # seconds between checks for `close`


class BoundedServer(socketserver.ThreadingMixIn):
    """A mixin for server classes: serves in a thread called ``name``, from `begin` to `close`.

    It answers at most ``most`` callers at once, each in a thread, and turns others away.
    """

    most: int
    name: str
    daemon_threads = True
    block_on_close = False  # a caller that sends nothing, or waits, must not hold the notebook

    def __init__(self, *arguments: Any) -> None:
        self._places = BoundedSemaphore(self.most)
        super().__init__(*arguments)

    def begin(self) -> None:
        """Serve until `close`, at the latest until the kernel exits."""
        self._thread = Thread(target=self.serve_forever, args=(_PERIOD,), name=self.name, daemon=True)  # type: ignore[attr-defined]
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Accept no more callers; calls in progress get their answers."""
        atexit.unregister(self.close)
        self.shutdown()  # type: ignore[attr-defined]
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[attr-defined]
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing in the notebook: a caller that hangs up is not an error of its user."""
