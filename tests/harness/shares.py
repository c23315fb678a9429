"""Checks that panel and timeline of a run agree on where the time of each rank went."""

from __future__ import annotations

import pytest

from ring_notebook.analysis.time_breakdown import SHARES
from ring_notebook.notebook.run.run import Run

__all__ = ["agreed_seconds"]


def agreed_seconds(run: Run) -> list[dict[str, float]]:
    """The seconds of each rank's time, by word, in a recorded run that has ended; they add up to the whole time.

    Tests compare seconds, not shares: a busy machine changes shares, but no sleep takes fewer seconds there.
    """
    seconds = []
    for rank, account in zip(run.log.view().ranks, run.timeline().accounts, strict=True):
        panel, timeline = (
            {word: spent.share(getattr(spent, part)) for word, part in SHARES.items()}
            for spent in (rank.spent, account.spent)
        )
        # Each reads the clock where the cell ends; another process may have run in between.
        apart = abs(rank.spent.seconds - account.spent.seconds) / account.spent.seconds
        assert panel == pytest.approx(timeline, abs=0.03 + apart), (rank.spent, account.spent)
        assert sum(panel.values()) == pytest.approx(1.0, abs=0.01)
        assert sum(timeline.values()) == pytest.approx(1.0, abs=0.01)
        seconds.append({word: getattr(account.spent, part) for word, part in SHARES.items()})
    return seconds
