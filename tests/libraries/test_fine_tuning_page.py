"""The cells of the page about fine-tuning, as they stand there; those of notebook 18 on what people have.

They live in an environment of their own: ``make test-libraries``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.two_hosts import NAMES, TwoHosts, hosts_or_skip
from harness.waiting import LIMIT, until
from ring_notebook.notebook.cluster.cluster import Cluster

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="in an environment of its own: make test-libraries")
PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "fine-tune.md"
PROGRAM = Path(__file__).with_name("notebook_cells.py")


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    yield from hosts_or_skip()


def test_its_cells_run() -> None:
    cells = re.findall(r"^```python\n%%ringtrain\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) == 3
    with Cluster(n=2) as cluster:
        for cell in cells:
            assert cluster.run(cell).wait().status == "ok"


@pytest.mark.timeout(20 * LIMIT)
def test_one_option_takes_the_cells_of_the_notebook_elsewhere(hosts: TwoHosts) -> None:
    """One rank, two, and two hosts: those learn the same that have equally many ranks, sharded or whole."""
    found = []
    for where in ({"n": 1}, {"n": 2}, {"hosts": f"{NAMES[0]}:1,{NAMES[1]}:1"}):
        said = hosts.on_first([sys.executable, str(PROGRAM), json.dumps(where)], timeout=6 * LIMIT)
        found.append(json.loads(said.splitlines()[-1]))
        until(lambda: not hosts.processes(), why=hosts.processes)
    one, two, across = found
    assert one["share"] == 1
    assert two["share"] == across["share"] == 0.5
    for each in found:
        assert each["full"] < each["before"]
        assert each["sharded"] == pytest.approx(each["full"], abs=0.01)
    assert across == pytest.approx(two, abs=0.01)
