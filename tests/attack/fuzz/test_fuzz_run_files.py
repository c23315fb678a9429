"""Whatever stands in the files of a run, it is read with what can be read, or refused with ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from attack.fuzz.fuzz import damaged, with_other_values
from attack.fuzz.test_fuzz_records import RECORDS
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.notebook.record.run_record import RunRecord
from ring_notebook.notebook.run.catalogue import listing
from ring_notebook.protocol.records import encode

COUNT = 150
FILES = ["run.json", "summary.json", "journal.jsonl"]


@pytest.fixture
def directory(records: Path) -> Path:
    log = RunLog(records / "runs" / "r", "r", "first", 2, "train()\n", {"plot": ["loss"]}, {"torch": "2"})
    log.put(encode(RECORDS))
    log.finish("ok")
    return log.directory


def versions(content: bytes) -> Iterator[bytes]:
    yield from damaged(content, COUNT, seed=7)
    with suppress(ValueError):  # a file of one object
        yield from (json.dumps(other).encode() for other in with_other_values(json.loads(content)))
        return
    for line in content.splitlines():
        for other in with_other_values(json.loads(line)):
            yield json.dumps(other).encode() + b"\n" + content


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str, directory: Path) -> None:
    file = directory / name
    for data in versions(file.read_bytes()):
        file.write_bytes(data)
        with suppress(FileNotFoundError, ValueError):
            record = RunRecord.load(directory)
            record.view()
            list(record.metrics())
            record.displays()
            record.failures()
        listing()
