"""The program of an engine: ipyparallel's, which imports from the current folder as the notebook does."""

from __future__ import annotations

import json
import os
import sys
import time
from json import JSONDecodeError
from types import SimpleNamespace
from typing import Any

from ring_notebook.machine.own_python import prepare_for_jupyter

prepare_for_jupyter()
from ipyparallel.engine.app import IPEngine  # noqa: E402
from jupyter_client import session  # noqa: E402
from zmq.eventloop.zmqstream import ZMQStream  # noqa: E402

from ring_notebook.horovod.common_util import env  # noqa: E402
from ring_notebook.protocol import question, records  # noqa: E402
from ring_notebook.protocol.registration import FORMATION, REPLACED  # noqa: E402
from ring_notebook.rank.rank_variables import STARTED_AGAIN  # noqa: E402

_SECONDS_TO_WRITE = 10.0  # for the controller, on a busy machine

# A cell may put other functions in the place of those of `json`, also what returns bytes, as orjson does.
for _module in (session, records, question):
    vars(_module)["json"] = SimpleNamespace(**vars(json))


class Engine(IPEngine):  # type: ignore[misc]
    """An engine that imports nothing from the current folder while it starts; its cells do, after Python's own modules.

    ipyparallel puts the current folder first. Then a user's ``random.py`` would replace Python's, and in a clone the
    sources of this package the installed one.
    """

    async def register(self) -> None:
        """Ask the controller for the number of this rank, with the formation that this engine was started for."""
        metadata = self.session.metadata
        self.session.metadata = {**metadata, FORMATION: int(os.environ.get(STARTED_AGAIN) or 0)}
        try:
            await super().register()
        finally:
            self.session.metadata = metadata

    async def complete_registration(self, msg: list[bytes], *connections: Any) -> None:
        """Connect with the controller, which may say later that another engine has this one's place."""
        self._end_if_replaced(msg)
        await super().complete_registration(msg, *connections)
        ZMQStream(self.registrar, self.loop).on_recv(self._end_if_replaced)

    def _end_if_replaced(self, msg: list[bytes]) -> None:
        session = self.session.clone()  # which may read a message once, as this one may
        _, parts = session.feed_identities(msg)
        content = session.deserialize(parts)["content"]
        if content.get("ename") == REPLACED:
            self.log.critical(content["evalue"])
            self.exit(255)

    def init_engine(self) -> None:
        super().init_engine()
        _put_current_folder(sys.path)

    def load_connection_file(self) -> None:
        """Read how to reach the controller. It may be writing the file: ipyparallel waits only until there is one."""
        ends = time.monotonic() + _SECONDS_TO_WRITE
        while True:
            try:
                return super().load_connection_file()  # type: ignore[no-any-return]
            except JSONDecodeError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)

    def start_nanny(self, control_url: str) -> Any:
        """Start the process that relays signals on another host, where a launcher of the site has started this one."""
        with env(PYTHONSAFEPATH="1"):  # from Python 3.11 on it then imports nothing from the current folder
            return super().start_nanny(control_url)


def _put_current_folder(path: list[str]) -> None:
    """Insert the current folder where IPython's kernel does: before the first folder of installed packages."""
    path[:] = filter(None, path)
    packages = (at for at, folder in enumerate(path) if os.path.basename(folder) in ("site-packages", "dist-packages"))
    path.insert(next(packages, len(path)), "")


def main() -> None:
    # With --mpi an engine takes its number from MPI.
    options = [f"--IPEngine.id={os.environ['RING_RANK']}"] if "RING_RANK" in os.environ else ["--mpi"]
    sys.argv[1:] = [*options, *sys.argv[1:]]
    Engine.launch_instance()


if __name__ == "__main__":
    main()
