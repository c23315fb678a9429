"""The notebooks of the workshop about data parallel training show what they say, and their checks help."""

from __future__ import annotations

from workshop.conftest import Workshop


def test_02_under_the_hood(workshop: Workshop) -> None:
    measured, _ = workshop(
        "02_under_the_hood",
        [
            ("outgoing = (me - step) % n", "outgoing = me", "What did the rank before pass on"),
            ("incoming = (me - step - 1) % n", "incoming = me", "Where does what is received go"),
        ],
    )
    assert measured["sent by each of 4 ranks, in tensors"] == measured["2(N-1)/N"]
    assert measured["core is faster, times (median over sizes)"] > 1
