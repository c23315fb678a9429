"""Tests on two hosts: they need root and iproute2, and say so where these are missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.two_hosts import TwoHosts, missing, two_hosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts joined by a link of 1 Gbit/s."""
    if reason := missing():
        pytest.skip(f"NOT TESTED on two hosts: {reason}")
    with two_hosts("1gbit") as made:
        yield made
