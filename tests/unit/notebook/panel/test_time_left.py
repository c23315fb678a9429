"""How much of a run is done, where its loop is passed over once per epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ring_notebook.notebook.panel import headline
from ring_notebook.notebook.panel.time_left import passes
from ring_notebook.notebook.record.run_log import RunLog
from ring_notebook.protocol.records import Status

EPOCHS = "epochs = 4\nfor epoch in range(epochs):\n    for batch in ring.track(loader):\n        step(batch)\n"
TWO = EPOCHS + "    for batch in ring.track(test):\n        check(batch)\n"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("for batch in ring.track(loader):\n    step(batch)\n", None),
        (EPOCHS, 4),
        ("%%time\n" + EPOCHS, 4),
        (EPOCHS.replace("range(epochs)", "range(1, epochs)"), 3),
        (EPOCHS.replace("range(epochs)", "range(1, epochs + 1)"), 4),
        (EPOCHS.replace("range(epochs)", "range(2 * epochs - 1, -1, -1)"), 8),
        (EPOCHS.replace("range(epochs)", "range(epochs / 2)"), 0),
        (EPOCHS.replace("range(epochs)", "range(1, unknown + 1)"), 0),
        (EPOCHS.replace("range(epochs)", "trange(epochs, desc='epochs')"), 4),
        (EPOCHS.replace("range(epochs)", "tqdm.auto.tqdm(range(epochs))"), 4),
        (EPOCHS.replace("range(epochs)", "args.range(epochs)"), 0),
        (EPOCHS.replace("range(epochs)", "['a', 'b']"), 2),
        (EPOCHS.replace("epoch in range(epochs)", "i, rate in enumerate([0.1, 0.01, 0.001])"), 3),
        (EPOCHS.replace("range(epochs)", "reversed(range(epochs))"), 4),
        (EPOCHS.replace("range(epochs)", "tqdm(range(epochs), desc='epochs')"), 4),
        (EPOCHS.replace("epoch in range(epochs)", "epoch, rate in zip(range(epochs), (0.1, 0.01))"), 2),
        (EPOCHS.replace("epoch in range(epochs)", "epoch, rate in zip(range(epochs), rates)"), 0),
        (EPOCHS.replace("range(epochs)", "[0.1, *others]"), 0),
        (EPOCHS.replace("range(epochs)", "[0.1, 0.2]") + "    if good: break\n", 0),
        (EPOCHS.replace("range(epochs)", "range()"), 0),
        (EPOCHS.replace("range(epochs)", "range(unknown)"), 0),
        (EPOCHS.replace("for epoch in range(epochs)", "while True"), 0),
        (EPOCHS + "    if good: break\n", 0),
        (EPOCHS + "        if few: break\n", 4),
        (TWO, 4),
        (TWO + "        with no_grad(), autocast():\n            for batch in track(test): check(batch)\n", 0),
        (TWO + "    with no_grad():\n        for batch in ring.track(test):\n            check(batch)\n", 4),
        (TWO + "    if epoch % 5 == 0:\n        for batch in ring.track(test):\n            check(batch)\n", 0),
        (
            TWO.replace("    for batch in ring.track(test)", "    if few: continue\n    for batch in ring.track(test)"),
            0,
        ),
        (TWO + "for batch in ring.track(test):\n    check(batch)\n", 0),
        (TWO.replace("range(epochs)", "range(unknown)"), 0),
        ("for batch in tqdm(ring.track(loader)):\n    step(batch)\n", None),
        ("for epoch in ring.track(range(3)):\n    train()\n", None),
        ("for", None),
    ],
)
def test_the_cell_says_how_many_passes_there_are(source: str, wanted: int | None) -> None:
    assert passes(source).planned == wanted


def said(directory: Path, source: str, number: int) -> headline.Headline:
    """The headline of a rank that is at step 30 of 40 of a pass, whose step 10 was ten seconds ago."""
    log = RunLog(directory / "r1", "r1", "", 1, source, {}, {}, 1000.0)
    log.now = lambda: 1010.0  # type: ignore[method-assign]
    for done, now in ((10, 1000.0), (30, 1010.0)):
        log._state.apply(Status("r1", 0, now, line=3, progress=(done, 40), extra={"pass": number}), now)
    try:
        return headline.headline(log, log.view())
    finally:
        log.finish("ok")


def test_the_share_of_all_passes_is_shown_where_their_number_is_known(tmp_path: Path) -> None:
    content = said(tmp_path, EPOCHS, 2)
    assert content.progress == pytest.approx((1 + 0.75) / 4)
    assert content.left == pytest.approx(5 + 2 * 20)
    assert content.part == ""


def test_an_epoch_of_two_loops_lasts_as_long_as_the_one_before(tmp_path: Path) -> None:
    """One of 20 s trains for 15 s, then validates; the first one says nothing about its validation yet."""
    log, now = RunLog(tmp_path / "r1", "r1", "", 2, TWO, {}, {}, 1000.0), 1000.0
    log.now = lambda: now  # type: ignore[method-assign]
    said = []
    for second in range(0, 76, 5):
        now, within = 1000.0 + second, second % 20
        progress = (within // 5, 3) if within < 15 else (20, 40)
        for rank in range(2):
            status = Status("r1", rank, now, progress=progress, extra={"pass": 1 + second // 20})
            log._state.apply(status, now)
        content = headline.headline(log, log.view())
        said.append((content.progress, content.left, content.part))
    log.finish("ok")
    assert [part for _, _, part in said] == ["pass 1"] * 4 + [""] * 12
    assert [left for _, left, _ in said[4:]] == pytest.approx([60 - 5 * number for number in range(12)])
    assert [share for share, _, _ in said[4:]] == pytest.approx([(20 + 5 * number) / 80 for number in range(12)])


@pytest.mark.parametrize(("source", "number"), [(TWO, 3), (EPOCHS, 5), ("train()\n", 2)])
def test_the_share_of_a_pass_is_named_as_such(tmp_path: Path, source: str, number: int) -> None:
    content = said(tmp_path, source, number)
    assert (content.progress, content.left) == pytest.approx((0.75, 5))
    assert f"75% of pass {number}" in headline.first_row(content)


@pytest.mark.parametrize(("source", "number"), [(EPOCHS, 0), ("train()\n", 1)])
def test_a_loop_that_knows_the_whole_says_it(tmp_path: Path, source: str, number: int) -> None:
    content = said(tmp_path, source, number)
    assert (content.progress, content.left, content.part) == (0.75, pytest.approx(5), "")


def test_steps_of_earlier_passes_count(tmp_path: Path) -> None:
    """A status comes once a second, and a pass of 30 steps takes three: ten steps a second."""
    log = RunLog(tmp_path / "r1", "r1", "", 1, EPOCHS, {}, {}, 1000.0)
    log.now = lambda: 1004.0  # type: ignore[method-assign]
    for second in range(5):
        done = 2 + 10 * second
        status = Status("r1", 0, 1000.0 + second, progress=(done % 30, 30), extra={"pass": 1 + done // 30})
        log._state.apply(status, 1000.0 + second)
    assert headline.headline(log, log.view()).left == pytest.approx((4 * 30 - 42) / 10)
    log.finish("ok")
