"""Pictures, figures, histograms and texts of `log` as displays that any page can show."""

from __future__ import annotations

import io
import math
import struct
import sys
import zlib
from base64 import b64encode
from collections import Counter, deque
from html import escape
from typing import Any

import numpy as np

from ring_notebook.protocol.records import HISTOGRAM, LOGGED, Display
from ring_notebook.text.error_text import printable

# The most images, figures, histograms and texts of a rank in a run, and the most characters of them in records.
MOST, MOST_SIZE = 500, 32 << 20
_ALWAYS = 10  # of each name, as long as there is room
MOST_SIDE = 512  # pixels of an image; of a larger one every second, third, ... is kept
MOST_FIGURE = 400_000  # bytes; a larger figure is drawn with fewer pixels
MOST_TEXT = 20_000  # characters
_SMALL = 128  # pixels; a smaller image is shown in whole multiples of its size
_DPI = (100, 60, 30)
_BINS = 48
_WIDTH, _HEIGHT = 320, 120  # pixels of a histogram's picture
_TEXT_HEIGHT = 16


class MediaLog:
    """The displays that this rank has logged in a run.

    A run has room for so many of a rank. When half of it is used, every fourth one of each name is kept, with half of
    the rest every sixteenth, and so on: so the end of a long run is seen too.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str, int, Any, Any]] = deque()  # kind, name, step, data and metadata
        self._count = self._size = 0
        self._given: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, name: str, step: int, value: Any) -> None:
        """Keep a value, unless it is left out. Raises TypeError, which says what the kind takes."""
        number, every = self._given[kind, name], self._every
        self._given[kind, name] += 1
        if every is None or (number % every and number >= _ALWAYS):
            if kind == "figure":
                _close(value)
            return
        try:
            data, metadata = bundle(kind, value)
        except TypeError as error:
            raise TypeError(f"log: {kind} {name!r} {error}") from None
        self._waiting.append((kind, name, step, data, metadata))
        self._count += 1
        self._size += sum(len(one) for one in data.values())
        if every == 1 and self._every != 1:
            sys.stderr.write(
                "ring.log: from here on only every fourth of the images, figures, histograms and texts of a name is "
                f"kept, later fewer; a rank has room for {MOST} or {MOST_SIZE >> 20} MiB\n"
            )

    def drain(self, run: str, rank: int) -> list[Display]:
        """Take the displays logged so far. Any thread may call it."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        return [
            Display(run, rank, data, {**about, LOGGED: {"kind": kind, "name": name, "step": step}}, f"{kind}/{name}")
            for kind, name, step, data, about in taken
        ]

    @property
    def _every(self) -> int | None:
        """Which of the next values are kept; None where there is no more room."""
        room = 1 - max(self._count / MOST, self._size / MOST_SIZE)
        return 4 ** max(0, math.ceil(-math.log2(room)) - 1) if room > 0 else None


def bundle(kind: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Data by MIME type, and metadata, of a value; ``kind`` is one of `records.MEDIA`.

    Raises TypeError, which says what the kind takes.
    """
    return {"image": _image, "figure": _figure, "histogram": _histogram, "text": _text}[kind](value)


def _image(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    pixels = _array_of_pillow(value) if hasattr(value, "mode") and hasattr(value, "convert") else _array(value)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    colors = (1, 3, 4)
    # PyTorch's tensors have channels first, arrays last; the other way works too.
    first = (
        pixels.ndim == 3 and pixels.shape[0] in colors and (hasattr(value, "detach") or pixels.shape[2] not in colors)
    )
    pixels = pixels.transpose(1, 2, 0) if first else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in colors or not pixels.size or pixels.dtype.kind not in "buif":
        raise TypeError(
            f"is no image: got shape {tuple(pixels.shape)} of {pixels.dtype}; give numbers of shape [height, width], "
            "[height, width, 3] or [3, height, width], floats from 0 to 1 or integers from 0 to 255"
        )
    every = math.ceil(max(pixels.shape[:2]) / MOST_SIDE)
    pixels = pixels[::every, ::every]
    scale = 255.0 if pixels.dtype.kind in "bf" else 1.0
    shown = np.clip(np.nan_to_num(pixels.astype(float) * scale), 0, 255).round().astype(np.uint8)
    height, width, _ = shown.shape
    times = max(1, _SMALL // max(height, width))
    size = {"width": width * times, "height": height * times}
    return {"image/png": b64encode(_png(shown)).decode(), "text/plain": f"image of {width} x {height}"}, {
        "image/png": size
    }


def _array_of_pillow(image: Any) -> Any:
    """An image of Pillow as an array of one, three or four channels."""
    pixels = np.asarray(image)
    # Older versions of Pillow open files of 16 bits in mode I, which integers from 0 to 255 have too.
    if image.mode.startswith("I;16") or (image.mode == "I" and pixels.max(initial=0) > 255):
        return pixels / 65535
    if image.mode in ("1", "L", "RGB", "RGBA", "I", "F") and "transparency" not in image.info:
        return pixels
    try:  # a palette, ink, or luminance and colors; with or without transparency
        return np.asarray(image.convert("RGBA"))
    except ValueError:
        raise TypeError(f"is no image: got mode {image.mode} of Pillow; convert it to RGBA or RGB first") from None


def _png(pixels: Any) -> bytes:
    """Pixels of shape [height, width, 1, 3 or 4] and dtype uint8 as a file."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with its filter, 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    color = {1: 0, 3: 2, 4: 6}[channels]
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0),
        b"IDAT": zlib.compress(rows.tobytes(), 6),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _figure(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if not hasattr(value, "savefig"):
        raise TypeError(f"is no figure: got {type(value).__name__}; give a figure of matplotlib")
    for dpi in _DPI:
        file = io.BytesIO()
        value.savefig(file, format="png", dpi=dpi, bbox_inches="tight")
        if file.tell() <= MOST_FIGURE:
            break
    _close(value)
    return {"image/png": b64encode(file.getvalue()).decode(), "text/plain": "figure"}, {}


def _close(figure: Any) -> None:
    """Otherwise the end of the cell would show it again."""
    if plots := sys.modules.get("matplotlib.pyplot"):
        plots.close(figure)


def _histogram(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    array = _array(value)
    if array.dtype.kind not in "buif":
        raise TypeError(f"is no array of numbers: got {array.dtype}")
    values = array.astype(float).ravel()
    finite = values[np.isfinite(values)]
    try:
        counts, edges = np.histogram(finite, bins=_BINS)
    except ValueError as error:  # the range of the values overflows
        raise TypeError(f"has no histogram: {error}") from None
    about = f"histogram of {values.size:,} values"
    about += f", mean {finite.mean():.4g}, deviation {finite.std():.4g}" if finite.size else ""
    about += f", {values.size - finite.size:,} of them not finite" if finite.size < values.size else ""
    source = b64encode(_bars(counts.tolist(), edges.tolist()).encode()).decode()
    # As an image: front ends remove SVG from notebooks that are not trusted.
    picture = f"<img alt='{escape(about)}' width='{_WIDTH}' src='data:image/svg+xml;base64,{source}'>"
    numbers = {"counts": counts.tolist(), "edges": edges.tolist()}
    return {"text/html": f"{picture}<div>{escape(about)}</div>", "text/plain": about, HISTOGRAM: numbers}, {}


def _bars(counts: list[int], edges: list[float]) -> str:
    width, height = _WIDTH / len(counts), _HEIGHT - _TEXT_HEIGHT
    top = max(counts) or 1
    bars = "".join(
        f"<rect x='{index * width:.1f}' y='{height * (1 - count / top):.1f}' width='{width - 0.8:.1f}' "
        f"height='{height * count / top:.1f}'/>"
        for index, count in enumerate(counts)
        if count
    )
    places = zip((0, len(counts) // 2, len(counts)), ("start", "middle", "end"), strict=True)
    ticks = "".join(
        f"<text x='{at * width:.1f}' y='{_HEIGHT - 3}' text-anchor='{anchor}'>{edges[at]:.4g}</text>"
        for at, anchor in places
    )
    style = "font-family='system-ui,sans-serif' font-size='11' fill='#8791a0'"
    size = f"width='{_WIDTH}' height='{_HEIGHT}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}><g fill='#6366f1'>{bars}</g>{ticks}</svg>"


def _text(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if not isinstance(value, str):
        raise TypeError(f"is no text: got {type(value).__name__}")
    return {"text/plain": printable(value, MOST_TEXT)}, {}


def _array(value: Any) -> Any:
    """A tensor of any device and dtype, or anything else with numbers, as a numpy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            return np.asarray(value)
        except TypeError:  # numpy lacks the dtype, such as bfloat16
            return np.asarray(value.float())
    return np.asarray(value)
