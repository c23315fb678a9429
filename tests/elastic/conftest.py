"""The ranks of these jobs are forks: most of their time would be that they import torch."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _ranks(forked_ranks: None) -> None:
    """As the folder says."""
