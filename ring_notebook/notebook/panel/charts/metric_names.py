"""What the name of a metric says: its group, its unit, what it validates, which way is better; and which are wanted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

_LOWER = re.compile(r"loss|err|mse|mae|ppl|perplex|nll|wer|fid|\bkl\b|entropy", re.IGNORECASE)
_HIGHER = re.compile(r"acc|auc|f1|bleu|rouge|iou|\bmap\b|reward|return|precision|recall|r2|score|psnr", re.IGNORECASE)
_VALIDATION = re.compile(r"^(?:val|valid|validation|test|eval)[_/. -](.+)$|^(.+)[_/. -](?:val|valid|test|eval)$")
_COMPARISON = "_every_step"  # the end of a metric that says what another would be if ranks synced at every step
_PARTS_OF_DATA = ("train", "val", "valid", "validation", "test", "eval")  # no groups: their metrics are compared
_PER_TIME = re.compile(r"(?:^|/)([^/]+/(?:s|sec|second|min|minute|h|hour))$")
_PER_SECOND = re.compile(r"(?:^|[_/. -])([a-zA-Z]+)_per_s(?:ec|econd)?$")
_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "seconds"), "s"),
    **{end: end for end in ("ms", "us", "ns", "tokens", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")},
    **{end.lower(): end for end in ("KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")},
    **dict.fromkeys(("bytes", "nbytes"), "bytes"),
    **dict.fromkeys(("pct", "percent"), "%"),
}
_END = re.compile(r"[_/. -]([^_/. -]+)$")
JOIN = "+"  # two metrics in one chart


@dataclass(frozen=True)
class Section:
    """The charts of a group that are shown, by their metrics, and how many are not."""

    group: str
    shown: tuple[str, ...]
    more: int = 0


def group(name: str) -> str:
    """The prefix of a metric: ``grad`` of ``grad/norm``; empty without one, and of ``train/loss`` and ``val/loss``."""
    prefix, _, rest = name.partition("/")
    return "" if not rest or prefix in _PARTS_OF_DATA or _PER_TIME.fullmatch(name) else prefix


def unit(name: str, given: Mapping[str, str]) -> str:
    """The unit of a metric: the one that was given to `log`, else what its name ends with; empty if unknown."""
    if name in given:
        return given[name]
    if found := _PER_TIME.search(name):
        return found[1]
    if found := _PER_SECOND.search(name):
        return f"{found[1]}/s"
    found = _END.search(name)
    return _UNITS.get(found[1], "") if found else ""


def direction(name: str) -> int:
    """-1 if a lower value of this metric is better, 1 if a higher one is, 0 if its name does not say."""
    return -1 if _LOWER.search(name) else 1 if _HIGHER.search(name) else 0


def trained(name: str, known: Collection[str]) -> str | None:
    """The metric in whose chart ``name`` is drawn too: ``loss`` for ``val_loss``; None if there is none."""
    if name.endswith(_COMPARISON) and name.removesuffix(_COMPARISON) in known:
        return name.removesuffix(_COMPARISON)
    found = _VALIDATION.match(name)
    if not found:
        return None
    base = found[1] or found[2]
    like = [one for one in (base, f"train_{base}", f"train/{base}", f"{base}_train") if one in known]
    return like[0] if like and like[0] != name else None


def titles(names: Collection[str]) -> tuple[str, ...]:
    """The metrics with a chart of their own: all that do not validate another one."""
    return tuple(name for name in names if trained(name, names) is None)


def parts(wanted: str, known: Collection[str]) -> tuple[str, ...]:
    """The known metrics of one chart: ``loss`` and ``val_loss`` of ``loss+val_loss``."""
    return (wanted,) if wanted in known else tuple(one for one in wanted.split(JOIN) if one in known)


def missing(wanted: Iterable[str], known: Collection[str]) -> list[str]:
    """The metrics of wanted charts that are not known; a pattern such as ``grad/*`` is known if it matches one."""
    every = (one for chart in expanded(wanted, known) for one in ((chart,) if chart in known else chart.split(JOIN)))
    return [one for one in dict.fromkeys(every) if one not in known]


def expanded(wanted: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The wanted charts, each pattern such as ``grad/*`` replaced by the metrics that it matches, if there are any."""
    found: dict[str, None] = {}
    for one in wanted:
        like = [name for name in known if fnmatchcase(name, one)] if any(sign in one for sign in "*?") else []
        found |= dict.fromkeys(like or [one])
    return tuple(found)


def sections(names: Collection[str], search: str, opened: Collection[str], most: int) -> list[Section]:
    """The charts of a page by group, those without a group first: of many the first ``most``.

    ``search``: only metrics with all of these words, each one; a word with a ``*`` must match all of a name. A group
    in ``opened`` is shown as a whole.
    """
    words = search.lower().split()
    groups: dict[str, list[str]] = {"": []}
    for name in titles(names):
        if all(_has(name.lower(), word) for word in words):
            groups.setdefault(group(name), []).append(name)
    found = []
    for prefix, of_group in groups.items():
        count = len(of_group) if words or prefix in opened else max(0, min(most, len(of_group)))
        most -= count
        if of_group:
            found.append(Section(prefix, tuple(of_group[:count]), len(of_group) - count))
    return found


def _has(name: str, word: str) -> bool:
    return fnmatchcase(name, word) if "*" in word else word in name
