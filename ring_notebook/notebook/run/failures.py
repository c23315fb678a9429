"""What the ranks' failures come to: one exception of the original type, one traceback, ranks grouped."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Iterable, Sequence

from ring_notebook.errors import RunFailed
from ring_notebook.records import Failure

__all__ = ["as_exception", "brief", "describe", "rank_list"]

_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def as_exception(failures: Sequence[Failure], still_running: Iterable[int] = ()) -> BaseException:
    """The first failure's own exception, which notebooks and plain Python show with `describe`'s text.

    ``still_running`` are ranks that did not stop although another one failed. ``failures`` must not be empty.
    """
    error = _original(_primary(failures)[0])
    text = describe(failures, still_running)
    brief(error, text)
    error.__cause__ = RunFailed(f"\n{text}")
    return error


def brief(error: BaseException, text: str) -> BaseException:
    """Have IPython show ``text`` for ``error`` instead of a traceback through our own code."""
    error._render_traceback_ = lambda: _highlighted(text)  # type: ignore[attr-defined]
    return error


def describe(failures: Sequence[Failure], still_running: Iterable[int] = ()) -> str:
    """One traceback into the cell, then a line for every group of ranks that ended in another way."""
    primary = _primary(failures)
    groups = _grouped(primary)
    first, ranks = groups[0]
    place = f'File "<cell of run {first.run}>"'
    lines = [first.traceback.rstrip().replace(place, "Cell")]
    if len(ranks) > 1:
        lines.append(f"{rank_list(ranks)}: same")
    elif len(failures) > 1 or not first.aborted:
        lines.append(f"raised on rank {first.rank}")
    for other, ranks in groups[1:]:
        lines.append(f"{rank_list(ranks)}: {_summary(other)}")
    stopped: dict[str, list[int]] = {}
    for failure in failures:
        if failure.aborted and failure not in primary:
            stopped.setdefault(_where_stopped(failure), []).append(failure.rank)
    lines += [f"{rank_list(ranks)}: {text}" for text, ranks in stopped.items()]
    if waiting := sorted(still_running):
        lines.append(f"{rank_list(waiting)}: still running; `%ring restart` if it does not stop")
    return "\n".join(lines)


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2, 3``; long lists as ``ranks 0-127``."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if len(ordered) > 4 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered))}"


def _primary(failures: Sequence[Failure]) -> list[Failure]:
    """Those that failed by themselves; all of them when every rank was only stopped (a rank left early)."""
    return [failure for failure in failures if not failure.aborted] or list(failures)


def _grouped(failures: Iterable[Failure]) -> list[tuple[Failure, list[int]]]:
    """One failure for each kind with the ranks that share it, in the order in which they came."""
    groups: dict[tuple[object, ...], tuple[Failure, list[int]]] = {}
    for failure in failures:
        key = (failure.ename, failure.module, failure.message, failure.frames)
        groups.setdefault(key, (failure, []))[1].append(failure.rank)
    return list(groups.values())


def _summary(failure: Failure) -> str:
    return f"{failure.ename} at line {_line(failure)}: {failure.message}"


def _where_stopped(failure: Failure) -> str:
    """The message of a rank that only stopped, without its number: others may have stopped in the same way."""
    line = _line(failure)
    text = failure.message.split("\n")[0].removeprefix(f"rank {failure.rank}: ")
    return f"line {line}: {text}" if line else text


def _line(failure: Failure) -> int:
    """The innermost line of the cell itself."""
    return next((line for file, line, _, _ in reversed(failure.frames) if file == "<cell>"), 0)


def _original(failure: Failure) -> BaseException:
    if failure.ename == "SystemExit":
        # Raised as itself it would end a script, or be taken for the notebook's own exit.
        return RunFailed(f"rank {failure.rank} called sys.exit({failure.message})")
    if failure.pickled:
        try:
            error = pickle.loads(bytes.fromhex(failure.pickled))
        except Exception:
            error = None
        if isinstance(error, BaseException):
            return error
    kind = getattr(builtins, failure.ename, None) if failure.module == "builtins" else None
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            return kind(failure.message)
        except TypeError:
            pass
    like: type[RunFailed] = type(failure.ename, (RunFailed,), {"__module__": failure.module})
    return like(failure.message)


def _highlighted(text: str) -> list[str]:
    return [
        f"{_RED}{line}{_PLAIN}" if line and not line.startswith((" ", "Traceback")) else line
        for line in text.split("\n")
    ]
