"""Changes knobs of a run and pauses it, beside the cell that its ranks execute."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ring_notebook.errors import ClusterError, KnobError
from ring_notebook.notebook.record.run_view import RunView
from ring_notebook.notebook.run.catalogue import find
from ring_notebook.notebook.style import shown
from ring_notebook.notebook.table import Listing
from ring_notebook.protocol.records import PAUSE, SET

if TYPE_CHECKING:
    from ring_notebook.notebook.engines import Engines

_RANK_SIDE = "ring_notebook.core.steering"
_SECONDS_TO_BEGIN = 5.0
"""For a run that has just begun: the knobs of an optimizer come with its first step."""


def send_change(engines: Engines, run: str, action: str, values: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Have rank 0 number a change, and send it to the others; returns the values as the knobs take them.

    ``who`` names the way in which it was made. Raises KnobError if a knob does not exist or does not take its value,
    and ClusterError if rank 0 does not answer.
    """
    given = {name: _plain(name, value) for name, value in values.items()}
    with suppress(Exception):  # a user without a name
        who = f"{getpass.getuser()}, {who}"
    until = time.monotonic() + _SECONDS_TO_BEGIN
    while True:
        try:
            (answer,) = engines.call_beside(f"{_RANK_SIDE}:change", run, action, given, who, ranks=[0])
        except TypeError as error:
            raise KnobError(f"a knob takes numbers, bools and texts, got {given!r:.200}: {error}") from None
        if answer is None:
            raise ClusterError("rank 0 does not answer, so nothing is changed; `%ring stacks` shows what it is doing")
        if not answer.get("early") or time.monotonic() > until:
            break
        time.sleep(0.05)
    if "error" in answer:
        raise KnobError(answer["error"])
    others = [rank for rank in engines.living() if rank != 0]
    engines.submit_beside(f"{_RANK_SIDE}:receive", (run, answer["changes"]), others)
    return dict(answer["values"])


def let_go(engines: Engines) -> None:
    """End the pause of ranks whose run cannot continue, because one of them has failed or died."""
    for rank in engines.living():
        with suppress(ClusterError):  # the controller has lost it before anybody noticed its death
            engines.submit_beside(f"{_RANK_SIDE}:let_go", (), [rank])


def changes_of(name: str) -> list[dict[str, Any]]:
    """The changes of the run that begins with ``name``, for a replay; none for an empty name.

    Raises RingError when there is no such run, KnobError when it had no change, and when two of its ranks took one at
    different points.
    """
    if not name:
        return []
    record = find(name)
    view = record.view()
    if trouble := parted(view):
        raise KnobError(f"run {record.title} cannot be replayed: {trouble}")
    made = [
        {"point": one.point, "action": one.action, "values": one.values, "who": f"replay of {record.title}"}
        for one in record.changed()
        if one.action == SET
    ]
    if not made:
        raise KnobError(f"run {record.title} changed no knob, so there is nothing to replay")
    return made


def pauses_at(steps: Sequence[int]) -> list[dict[str, Any]]:
    """Automatic pauses after these steps of a run, in the form of `changes_of`."""
    return [{"point": step, "action": PAUSE, "values": {}, "who": "--pause-at"} for step in steps]


def begins_with(values: Mapping[str, Any], who: str) -> list[dict[str, Any]]:
    """The values of knobs at the beginning of a run, in the form of `changes_of`."""
    return [{"point": 0, "action": SET, "values": dict(values), "who": who or "--set"}] * bool(values)


def parted(view: RunView) -> str:
    """Which ranks took a change at different points, by mistake; empty if none did."""
    return "; ".join(
        f"rank {other.rank} took change {one.number} after {other.point} steps, rank {one.rank} after {one.point}"
        for one, other in view.parted
    )


def listing(title: str, view: RunView) -> Listing:
    """The knobs of a run: the values that they take, and who has set them last."""
    rows = []
    for name, knob in view.knobs.items():
        last = next((one for one in reversed(view.changes) if name in one.values), None)
        by = f"{last.who}, step {last.step}" if last else ""
        rows.append([name, shown(knob.value), knob.range.described(), by])
    return Listing(["knob", "value", "takes", "set by"], rows, f"of run {title}" if rows else f"Run {title} has none.")


def _plain(name: str, value: Any) -> Any:
    """The number in an array or tensor with one element; any other value itself."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError, TypeError):
        raise KnobError(f"{name}: a knob takes one number, bool or text, got {value!r:.200}") from None
