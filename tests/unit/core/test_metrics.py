"""log and track: what is recorded, what is refused, what it costs."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.programs import ran
from ring_notebook.analysis import time_breakdown
from ring_notebook.core import logged_media, metrics, time_spent
from ring_notebook.protocol.records import LOGGED, MetricBatch


@pytest.fixture(autouse=True)
def _recording() -> Iterator[None]:
    metrics.begin()
    yield
    metrics.end()


def rows() -> list[dict[str, float]]:
    """What was recorded, without the time."""
    batches = metrics.drain("run", 0)
    return [dict(zip(("step", *batch.names), row[1:], strict=True)) for batch in batches for row in batch.rows()]


def test_carried_values_are_in_every_row_until_the_run_ends() -> None:
    metrics.log(loss=1.0)
    metrics.carry(noise=5.0)
    metrics.log(loss=2.0)
    metrics.log(loss=3.0, noise=0.5)
    metrics.carry(noise=6.0)
    metrics.log()
    assert rows() == [
        {"step": 0.0, "loss": 1.0},
        {"step": 1.0, "loss": 2.0, "noise": 5.0},
        {"step": 2.0, "loss": 3.0, "noise": 0.5},
        {"step": 3.0, "noise": 6.0},
    ]
    metrics.begin()
    metrics.log(loss=1.0)
    assert rows() == [{"step": 0.0, "loss": 1.0}]


def test_rows_keep_their_order_and_names() -> None:
    metrics.log(loss=0.5)
    metrics.log(loss=0.25)
    metrics.log(accuracy=1)
    metrics.log(loss=0.125, step=7)
    batches = metrics.drain("run", 3)
    assert [batch.names for batch in batches] == [("loss",), ("accuracy",), ("loss",)]
    assert [row[1:] for row in batches[0].rows()] == [(0.0, 0.5), (1.0, 0.25)]
    assert next(batches[2].rows())[1] == 7
    assert all(batch.rank == 3 for batch in batches)
    assert abs(next(batches[0].rows())[0] - time.time()) < 5
    assert metrics.drain("run", 3) == []


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1.0), np.array([1.0]), np.int64(1)])
def test_numbers_and_arrays_of_one_element(value: object) -> None:
    metrics.log(x=value)
    assert rows() == [{"step": 0.0, "x": 1.0}]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("1.0", "str"),
        (b"1", "bytes"),
        (None, "NoneType"),
        ([1], "list"),
        (1j, "complex"),
        (np.zeros((2, 3)), r"ndarray of shape \(2, 3\)"),
        (torch.zeros((), device="meta"), r"Tensor of shape \(\)"),
        (torch.zeros((), dtype=torch.complex64, device="meta"), r"Tensor of shape \(\)"),
    ],
)
def test_what_is_no_number_is_named(value: object, kind: str) -> None:
    with pytest.raises(TypeError, match=f"metric 'x' is not a number: got {kind}; log one number per name"):
        metrics.log(x=value)
    assert rows() == []


def test_a_name_that_cannot_be_sent_is_an_error_of_the_call() -> None:
    with pytest.raises(TypeError, match=r"metric 'loss\\ud800' is not a name: surrogates not allowed"):
        metrics.log(**{"loss\ud800": 1.0})
    assert rows() == []


def test_a_value_on_a_device_is_copied_now_and_read_later() -> None:
    class OnDevice:
        """A tensor whose reading would wait for its device."""

        is_cpu = False
        dtype = float
        waits = 0

        def __init__(self, value: float) -> None:
            self.value = value

        def numel(self) -> int:
            return 1

        def detach(self) -> OnDevice:
            return self

        def clone(self) -> OnDevice:
            return OnDevice(self.value)

        def item(self) -> float:
            raise AssertionError("waited for the device")

        def __float__(self) -> float:
            OnDevice.waits += 1
            return self.value

    loss = OnDevice(2.0)
    metrics.log(loss=loss)
    loss.value = 3.0
    assert OnDevice.waits == 0
    assert rows() == [{"step": 0.0, "loss": 2.0}]


def test_track_counts_samples_steps_and_progress() -> None:
    batches = [(np.zeros((4, 2)), np.zeros(4)), (np.zeros((3, 2)), np.zeros(3))]
    for epoch in range(2):
        for index, _ in enumerate(metrics.track(batches)):
            assert metrics.progress() == (index, 2)
            metrics.log(loss=epoch)
    assert metrics.progress() == (2, 2)
    assert [(row["step"], row["samples"]) for row in rows()] == [(0, 4), (1, 3), (2, 4), (3, 3)]


def test_a_loop_over_epochs_has_no_steps_of_its_own() -> None:
    """Steps are those of the loop over batches, also where a loop over another loader stands in it."""
    for _ in metrics.track(range(2)):
        for _ in metrics.track([np.zeros(4)] * 3):
            metrics.log(loss=1.0)
    assert [row["step"] for row in rows()] == [0, 1, 2, 3, 4, 5]
    metrics.begin()
    for _ in metrics.track([np.zeros(4)] * 2):
        metrics.log(loss=1.0)
        for _ in metrics.track([np.zeros(1)] * 2):
            metrics.log(val_loss=1.0)
    assert [row["step"] for row in rows()] == [0, 1, 2, 3, 4, 5]


def test_batches_that_ranks_share_count_once() -> None:
    """Four stages of a pipeline, each of which tracks the loader, count a quarter of its samples each."""
    list(metrics.track([torch.zeros(6, 2)], shared_by=4))
    (batch,) = metrics.drain("run", 0)
    metrics.end()
    assert batch.names == ("samples",)
    assert batch.values[-1] == 1.5
    with pytest.raises(ValueError, match="shared_by must be at least 1"):
        metrics.track([], shared_by=0)


def test_track_with_a_total_goes_on_over_epochs() -> None:
    loader = metrics.track([1, 2, 3], total=6)
    assert len(loader) == 3
    for expected in (3, 6):
        assert len(list(loader)) == 3
        assert metrics.progress() == (expected, 6)


def test_track_records_samples_also_when_nothing_is_logged() -> None:
    for _ in metrics.track([np.zeros(5)] * 4):
        pass
    assert sum(row["samples"] for row in rows()) == 20


def test_samples_of_ones_own_are_not_counted_twice() -> None:
    for _ in metrics.track([np.zeros(5)] * 2):
        metrics.log(loss=1, samples=7)
    assert [row["samples"] for row in rows()] == [7, 7]


@dataclass(frozen=True)
class Graphs:
    scale: float
    x: Any


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.zeros((6, 2)), 6),
        ({"x": np.zeros((5, 2)), "y": np.zeros(5)}, 5),
        ([[1, 2, 3], [4, 5, 6]], 3),
        (["a", "b"], 2),
        ({"names": "a", "scale": np.float32(2), "x": np.zeros((5, 2))}, 5),
        (Graphs(0.5, np.zeros((3, 2))), 3),
        (SimpleNamespace(num_graphs=4, x=np.zeros((30, 2))), 4),
        (7, None),
    ],
)
def test_samples_of_a_batch(batch: object, samples: int | None) -> None:
    for _ in metrics.track([batch]):
        metrics.log(loss=1)
    assert rows()[0].get("samples") == samples


def test_a_collection_that_has_no_core_is_no_work_of_the_collector() -> None:
    """Where others use the cores, each collection takes longer. A finalizer that sleeps waits as surely."""

    class Sleeper:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            time.sleep(1)

    gc.collect()
    Sleeper()
    before = time_spent._linux.read(fresh=True)["collecting"]
    gc.collect()
    assert 0 < time_spent._linux.read(fresh=True)["collecting"] - before < 1


def test_time_spent_waiting_for_data() -> None:
    slept = [0.0, 0.0]

    def sleep(which: int) -> None:
        began = time.monotonic()
        time.sleep(0.02)
        slept[which] += time.monotonic() - began

    def slow() -> Iterator[int]:
        for index in range(3):
            sleep(0)
            yield index

    began = time.monotonic()
    for _ in metrics.track(slow()):
        sleep(1)  # must not count
    most = time.monotonic() - began - slept[1]
    assert slept[0] - 1e-6 <= metrics.totals()["data_wait"] <= most + 1e-6
    assert metrics.progress() == (3, 0)


def test_a_wait_for_a_core_is_no_wait_for_data() -> None:
    """Batches that the main thread makes, while another process uses its only core."""
    allowed = os.sched_getaffinity(0)

    def busy() -> Iterator[int]:
        while metrics.totals()["queued_for_data"] < 0.05:
            ends = time.thread_time() + 0.01
            while time.thread_time() < ends:
                pass
            yield 1

    os.sched_setaffinity(0, {min(allowed)})
    began = time.thread_time()
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                for _ in metrics.track(busy()):
                    pass
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    spent = time_breakdown.spent(metrics.totals(), 1.0)
    assert spent.fetching - spent.data == pytest.approx(metrics.totals()["queued_for_data"])
    assert spent.data < time.thread_time() - began + 0.05, "only the work of the loader, and what it slept"


def test_nothing_is_lost_while_another_thread_drains() -> None:
    drained: list[MetricBatch] = []
    done = threading.Event()

    def drain() -> None:
        while not done.is_set():
            drained.extend(metrics.drain("run", 0))

    thread = threading.Thread(target=drain)
    thread.start()
    for step in range(20_000):
        metrics.log(x=step, step=step)
    done.set()
    thread.join()
    drained.extend(metrics.drain("run", 0))
    assert [row[1] for batch in drained for row in batch.rows()] == list(range(20_000))


def test_a_script_prints_one_line_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.end()
    for step in range(100):
        metrics.log(loss=1 / (step + 1))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 1
    time.sleep(1.05)
    metrics.log(loss=0.001)
    assert capsys.readouterr().out.endswith("loss 0.001\n")


def test_a_script_prints_its_last_row() -> None:
    script = "from ring_notebook.core.metrics import log\nfor i in range(5): log(loss=i)"
    done = ran([sys.executable, "-c", script], check=True)
    assert done.stdout.splitlines()[-1] == "step 4  loss 4"


@pytest.mark.parametrize(
    ("pixels", "shape", "width"),
    [
        (np.zeros((4, 6)), (4, 6, 1), 126),
        (np.zeros((4, 6, 3), np.uint8), (4, 6, 3), 126),
        (np.zeros((3, 8, 6), np.float32), (8, 6, 3), 96),
        (torch.zeros(3, 6, 4, dtype=torch.bfloat16), (6, 4, 3), 84),
        (torch.zeros(1, 5, 5, requires_grad=True), (5, 5, 1), 125),
        (np.zeros((2000, 600)), (500, 150, 1), 150),
    ],
)
def test_an_image_becomes_a_picture(pixels: Any, shape: tuple[int, ...], width: int) -> None:
    metrics.log(loss=2.0)
    metrics.log(loss=1.0, image=pixels)
    (shown,) = metrics.drain_shown("run", 3)
    assert shown.metadata["ring_logged"] == {"kind": "image", "name": "image", "step": 1}
    assert shown.metadata["image/png"]["width"] == width
    picture = np.asarray(Image.open(io.BytesIO(b64decode(shown.data["image/png"]))))
    assert picture.reshape(shape).max() == 0
    assert metrics.drain("run", 0)[0].names == ("loss",)


def test_a_picture_has_the_colors_of_its_numbers() -> None:
    metrics.log(image={"float": np.array([[0, 0.5, 2, np.nan]]), "whole": np.array([[0, 128, 300, 5]])})
    pictures = [Image.open(io.BytesIO(b64decode(one.data["image/png"]))) for one in metrics.drain_shown("run", 0)]
    assert [np.asarray(one).ravel().tolist() for one in pictures] == [[0, 128, 255, 0], [0, 128, 255, 5]]


def palette_with_transparency(image: Image.Image) -> Image.Image:
    palette = image.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    return palette


@pytest.mark.parametrize(
    "made",
    [
        *(
            lambda image, mode=mode: image.convert(mode)
            for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
        ),
        lambda image: image.convert("LA").convert("PA"),
        lambda image: image.convert("RGBA").convert("RGBa"),
        lambda image: image.convert("RGB").convert("RGBX"),
        palette_with_transparency,
    ],
)
def test_an_image_of_pillow_keeps_its_colors(made: Callable[[Image.Image], Image.Image]) -> None:
    pixels = [[200, 30, 30, 255], [30, 200, 30, 255], [30, 30, 200, 255], [90, 90, 90, 100]]
    image = made(Image.fromarray(np.array([pixels, pixels[::-1]], np.uint8), "RGBA"))
    metrics.log(image=image)
    (shown,) = metrics.drain_shown("run", 0)
    picture = Image.open(io.BytesIO(b64decode(shown.data["image/png"])))
    assert np.array_equal(picture.convert("RGBA"), image.convert("RGBA"))


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I"])
def test_an_image_of_16_bits_keeps_its_brightness(mode: str) -> None:
    gray = np.array([[0, 257 * 50], [257 * 200, 65535]])
    image = Image.new(mode, (2, 2))
    image.putdata(gray.ravel().tolist())
    metrics.log(image=image)
    (shown,) = metrics.drain_shown("run", 0)
    assert np.asarray(Image.open(io.BytesIO(b64decode(shown.data["image/png"])))).tolist() == [[0, 50], [200, 255]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"image": Image.new("La", (4, 4))},
            "log: image 'image' is no image: got mode La of Pillow; convert it to RGBA",
        ),
        ({"image": np.zeros((2, 3, 4, 5))}, r"log: image 'image' is no image: got shape \(2, 3, 4, 5\) of float64"),
        ({"image": "x.png"}, "is no image"),
        ({"figure": "x"}, "log: figure 'figure' is no figure: got str"),
        ({"histogram": ["a"]}, "log: histogram 'histogram' is no array of numbers"),
        ({"text": {"note": 3}}, "log: text 'note' is no text: got int"),
        ({"text": {1: "a"}}, "log: text 1 must have a text for a name"),
        ({"loss": 1.0, "units": 3}, "log: units must be texts by metric"),
    ],
)
def test_what_is_not_of_its_kind_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        metrics.log(**values)


def test_numbers_are_metrics_whatever_their_name() -> None:
    metrics.log(image=3, text=0.5)
    (batch,) = metrics.drain("run", 0)
    assert (batch.names, [*batch.values][2:]) == (("image", "text"), [3.0, 0.5])


def test_a_unit_is_sent_once() -> None:
    for unit in ("m", "m", "km"):
        metrics.log(length=1.0, units={"length": unit})
        metrics.log(other=1.0)
    assert [batch.units for batch in metrics.drain("run", 0)] == [{"length": "km"}, {}, {}, {}, {}, {}]
    metrics.log(length=1.0, units={"length": "km"})
    assert metrics.drain("run", 0)[0].units == {}


def test_a_run_goes_on_where_another_was() -> None:
    """The steps of `track`, the samples and the epoch; progress counts the whole training."""
    batches, total = [[1, 2, 3]] * 4, 12
    for _ in metrics.track(batches, total):
        metrics.log(epoch=0)
    for number, _ in enumerate(metrics.track(batches, total)):
        metrics.log(epoch=1)
        if number == 1:
            position = metrics.position()
    assert position == (6, 5, 5, 18.0, (4, 1.0))
    metrics.begin()
    metrics.continue_at(position)
    for number, _ in enumerate(metrics.track(batches, total)):
        if number == 0:
            assert metrics.progress() == (6, 12)
        metrics.log(epoch=1 + number // 2)
    (first,) = metrics.drain("run", 0)
    assert [row[1] for row in first.rows()] == [6, 7, 8, 9]
    assert first.earlier == {"samples": 18.0, "epoch": 1.0, "epoch_step": 4.0}
    assert metrics.position() == (10, 9, 9, 30.0, (8, 2.0))
    metrics.log(loss=1.0)
    assert metrics.drain("run", 0)[0].earlier == {}, "once"


@pytest.mark.parametrize("first", [0, 1, 500])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_first_step_made_from_now_on(first: int, behind: bool, named: bool) -> None:
    """Whether a loop logs a step before its point or behind it, and however it counts."""
    first = first if named else 0
    assert metrics.next_step() == 0
    for point in range(1, 4):
        number = first + point - 1
        if not behind:
            metrics.log(number if named else None, loss=1.0)
        metrics.pass_point(point)
        if point > 1 or not behind:  # else no row has said how it counts
            assert metrics.next_step() == number + 1
            position = metrics.position()
        if behind:
            metrics.log(number if named else None, loss=1.0)
    metrics.begin()
    for number, _ in enumerate(metrics.track([0] * 3), start=1):
        assert metrics.next_step() == number
    metrics.begin()
    metrics.continue_at(position)  # a branch: its first row is that of the step behind the last point
    assert metrics.next_step() == first + 3
    metrics.drain("run", 0)
    metrics.log(loss=1.0)
    (batch,) = metrics.drain("run", 0)
    assert named or [row[1] for row in batch.rows()] == [3]
    metrics.begin()
    metrics.pass_point(7)
    assert metrics.next_step() == 7, "of a loop that logs nothing"


def test_training_begins_with_the_first_of_several_steps() -> None:
    """A single row, as of a result at the end of a cell, begins none."""
    seen: list[str] = []

    def first_row() -> Callable[[], None]:
        seen.append("first row")
        return lambda: seen.append("begins there")

    metrics.begin(on_first_row=first_row)
    metrics.log(3, loss=1.0)
    metrics.log(3, accuracy=1.0)
    assert seen == ["first row"]
    for step in (4, 5):
        metrics.log(step, loss=1.0)
    assert seen == ["first row", "begins there"]


def test_without_a_loop_rows_are_counted_on() -> None:
    metrics.log(loss=1.0)
    metrics.log(loss=1.0, samples=8)
    position = metrics.position()
    metrics.begin()
    metrics.continue_at(position)
    metrics.log(loss=1.0)
    assert [row for batch in metrics.drain("run", 0) for row in batch.values[1:]] == [2.0, 1.0]


def test_of_very_many_pictures_the_whole_run_has_some(capsys: pytest.CaptureFixture[str]) -> None:
    given = 20 * logged_media.MOST
    for step in range(given):
        metrics.log(step=step, text={"often": "x", **({"seldom": "y"} if step % 1000 == 0 else {})})
    logged = [one.metadata[LOGGED] for one in metrics.drain_shown("run", 0)]
    assert len(logged) <= logged_media.MOST
    often = [one["step"] for one in logged if one["name"] == "often"]
    assert often[:250] == [*range(250)]
    assert often[-1] > 0.9 * given
    assert sum(one["name"] == "seldom" for one in logged) > 1
    assert capsys.readouterr().err.count("only every fourth of the images") == 1
    metrics.begin()
    metrics.log(text="x")
    assert len(metrics.drain_shown("run", 0)) == 1


def test_a_figure_that_is_left_out_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plots = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(logged_media, "MOST", 4)
    for _ in range(30):  # matplotlib warns of more than 20 open ones
        metrics.log(figure=plots.figure(figsize=(0.2, 0.2)))
    assert plots.get_fignums() == []
    assert len(metrics.drain_shown("run", 0)) <= 4


def test_a_script_shows_no_pictures() -> None:
    metrics.end()
    metrics.log(text="x")
    assert metrics.drain_shown("run", 0) == []


def test_each_logical_rank_counts_its_own_steps() -> None:
    """As on a rank of its own: several rows of a turn, rows and tracked batches between rounds, and a continuation."""

    def trained(turns: int) -> list[tuple[float, ...]]:
        for _ in range(2):
            for _ in range(2):
                for turn in range(turns):
                    metrics.note_turn((turn, turn))
                    metrics.log(loss=1.0)
                    metrics.log(norm=2.0)
            metrics.note_turn(None)
            metrics.log(tested=3.0)
        return [(row[1], *row[2:]) for batch in metrics.drain("run", 0) for row in batch.rows()]

    metrics.begin()
    alone = trained(1)
    assert [row[0] for row in alone] == [*range(10)]
    position = metrics.position()
    metrics.begin()
    metrics.forget_turns()
    together = trained(3)
    for turn in range(3):
        assert [row for row in together if len(row) == 2 or row[1] == turn] == [
            (row[0], turn, *row[2:]) if len(row) > 2 else row for row in alone
        ]
    assert metrics.position() == position
    metrics.begin()
    metrics.continue_at(position)
    again = trained(2)
    assert [row[0] for row in again if len(row) == 2 or row[1] == 1] == [*range(10, 20)]


def test_each_logical_rank_counts_its_own_tracked_batches() -> None:
    def turns(rounds: int) -> Iterator[int]:
        for _ in range(rounds):
            for turn in range(2):
                metrics.note_turn((turn, turn))
                yield turn
        metrics.note_turn(None)

    metrics.forget_turns()
    for _ in range(2):
        for _ in metrics.track(turns(2)):
            metrics.log(loss=1.0)
        for _ in metrics.track(range(3)):
            metrics.log(tested=0.0)
    found: dict[tuple[str, float], list[float]] = {}
    for batch in metrics.drain("run", 0):
        for _, step, *values in batch.rows():
            found.setdefault((batch.names[-1], values[0]), []).append(step)
    assert found == {
        ("loss", 0.0): [0, 1, 5, 6],
        ("loss", 1.0): [0, 1, 5, 6],
        ("tested", 0.0): [2, 3, 4, 7, 8, 9],
    }
