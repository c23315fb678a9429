"""The program of an engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from ring_notebook.engine.engine_program import Engine

CONNECTION = {
    "interface": "tcp://127.0.0.1",
    "registration": 1,
    "location": "127.0.0.1",
    "ssh": "",
    "key": "k",
    "signature_scheme": "hmac-sha256",
    "pack": "json",
    "unpack": "json",
}


def test_a_connection_file_that_is_being_written(tmp_path: Path) -> None:
    """The controller has made it, and writes it a little later."""
    file = tmp_path / "engine.json"
    file.touch()
    engine = Engine(url_file=str(file))
    writer = threading.Timer(0.3, file.write_text, [json.dumps(CONNECTION)])
    writer.start()
    engine.load_connection_file()
    writer.join()
    assert engine.registration_url == "tcp://127.0.0.1:1"
