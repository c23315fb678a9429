"""What users see when ranks fail: the original type, one traceback, ranks grouped."""

from __future__ import annotations

import math
import pickle
import time
from dataclasses import replace

import pytest

from ring_notebook.engine import failure_record
from ring_notebook.errors import RunFailed
from ring_notebook.notebook.run.failures import as_exception, brief, describe, in_a_line
from ring_notebook.protocol.records import Failure

TRACED = "\n`%ring trace` shows the last operations of all ranks"


def failure(rank: int, message: str = "boom", *, line: int = 3, aborted: bool = False, **changes: object) -> Failure:
    values: dict[str, object] = {
        "run": "r1",
        "rank": rank,
        "ename": "CollectiveAborted" if aborted else "ValueError",
        "module": "ring_notebook.errors" if aborted else "builtins",
        "message": message,
        "frames": (("<cell>", line, "<module>", "f()"),),
        "traceback": f'Traceback (most recent call last):\n  File "<cell of run r1>", line {line}\n{message}\n',
        "aborted": aborted,
    }
    return Failure(**{**values, **changes})  # type: ignore[arg-type]


def test_the_pickled_exception_comes_back_as_itself() -> None:
    error = as_exception([failure(1, pickled=pickle.dumps(KeyError("name")).hex())], "")
    assert type(error) is KeyError
    assert error.args == ("name",)


def test_without_a_pickle_the_builtin_type_comes_back() -> None:
    error = as_exception([failure(1)], "")
    assert type(error) is ValueError
    assert str(error) == "boom"


def test_an_unknown_type_keeps_its_name() -> None:
    error = as_exception([failure(0, ename="MyError", module="mine", pickled=b"no pickle".hex())], "")
    assert type(error).__name__ == "MyError"
    assert isinstance(error, RunFailed)


def test_sys_exit_does_not_end_the_notebook() -> None:
    error = as_exception([failure(2, "3", ename="SystemExit")], "")
    assert isinstance(error, RunFailed)
    assert "rank 2 called sys.exit(3)" in str(error)


def test_in_a_line_no_failure_is_an_empty_word() -> None:
    assert in_a_line([failure(1), failure(2)]) == "ValueError: boom (ranks 1-2, line 3)"
    silent = replace(failure(0, "", ename="AssertionError"), frames=(("<cell>", 5, "<module>", "assert x == y"),))
    assert in_a_line([silent]) == "AssertionError: assert x == y (rank 0, line 5)"
    assert "rank 0: AssertionError at line 5: assert x == y" in describe([failure(1), silent])
    assert in_a_line([replace(silent, frames=())]) == "AssertionError (rank 0)"
    assert in_a_line([failure(3, "a table\n1 2")]) == "ValueError: a table (rank 3, line 3)"


def test_ranks_that_lost_a_name_with_their_process_are_told_apart_from_a_mistake() -> None:
    missing = [failure(rank, "name 'np' is not defined", ename="NameError") for rank in range(3)]
    said = "run the cells with your imports there again"
    assert f"ranks 0-1 were replaced at {time.strftime('%H:%M:%S', time.localtime(60))}: {said}" in describe(
        missing[:2], replaced={0: 30.0, 1: 60.0}
    )
    assert said not in describe(missing, replaced={0: 30.0, 1: 60.0}), "a rank that was not replaced misses it too"
    assert said not in describe([failure(1)], replaced={1: 30.0})


def test_a_variable_of_the_notebook_that_ranks_do_not_have() -> None:
    missing = [failure(rank, "name 'model' is not defined", ename="NameError") for rank in range(2)]
    said = "model is a variable of the notebook, and ranks have their own: `%ring push model` copies it to them"
    assert said in describe(missing, notebook={"model": 1})
    assert said not in describe(missing, notebook={"mode": 1})
    assert said not in describe(missing, replaced={0: 30.0, 1: 60.0}, notebook={"model": 1}), "they had it"


def test_ring_of_the_notebook_is_none_to_push() -> None:
    missing = [failure(rank, "name 'ring' is not defined", ename="NameError") for rank in range(2)]
    shown = describe(missing, notebook={"ring": 1})
    assert "push" not in shown
    assert "`import ring_notebook.torch as ring` in a `%%ringtrain` cell makes it" in shown


def test_a_variable_of_the_environment_that_was_set_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = (("<cell>", 2, "<module>", "os.environ['TOKEN']"), ("os.py", 679, "__getitem__", "raise KeyError(key)"))
    missing = failure(0, "'TOKEN'", ename="KeyError", frames=frames)
    assert "environment" not in describe([missing])
    monkeypatch.setenv("TOKEN", "secret")
    shown = describe([missing])
    assert "TOKEN is set in the environment of the notebook" in shown
    assert "`%ring restart` gives it to them" in shown
    assert "secret" not in shown
    assert "environment" not in describe([replace(missing, frames=(("<cell>", 2, "<module>", "d['TOKEN']"),))])


def test_equal_failures_are_one_group() -> None:
    text = describe([failure(0), failure(2), failure(3)])
    assert text.count("Traceback") == 1
    assert "Cell, line 3" in text
    assert "ranks 0, 2-3: same" in text


def test_different_failures_are_told_apart() -> None:
    text = describe([failure(1), failure(0, "other", line=7)])
    assert "raised on rank 1" in text
    assert "rank 0: ValueError at line 7: other" in text


def test_ranks_that_only_stopped_are_one_line_and_never_the_cause() -> None:
    stopped = [
        failure(rank, f"rank {rank}: allreduce 'bucket 3' stopped because rank 1 raised", line=5, aborted=True)
        for rank in (0, 2)
    ]
    failures = [*stopped, failure(1)]
    assert type(as_exception(failures, "")) is ValueError
    assert "ranks 0, 2: line 5: allreduce 'bucket 3' stopped because rank 1 raised" in describe(failures)


def test_a_rank_that_had_not_begun_says_so_and_names_no_barrier() -> None:
    waited = failure(0, "rank 0: barrier 'begin' (sequence 1) stopped because rank 1 raised NameError", aborted=True)
    opening = replace(waited, frames=(("runner.py", 9, "open_run", ""),))
    assert (
        describe([failure(1), opening])
        .removesuffix(TRACED)
        .endswith("rank 0: stopped before the first line because rank 1 raised NameError")
    )


def test_when_all_ranks_only_stopped_that_is_the_cause() -> None:
    error = as_exception([failure(0, "rank 1 has left", aborted=True)], "")
    assert type(error).__name__ == "CollectiveAborted"


def test_ranks_that_go_on_are_named() -> None:
    assert "ranks 2-3: still running" in describe([failure(1)], still_running=[3, 2])


def test_notebooks_show_the_text_alone() -> None:
    error = brief(ValueError("x"), "one line")
    assert [line.strip("\x1b[310m") for line in error._render_traceback_()] == ["one line"]  # type: ignore[attr-defined]


def test_a_mismatch_shows_its_table_once() -> None:
    table = "\nThe calls at sequence 2:\n  rank 0: allreduce [3]\n  rank 1: barrier"
    both = [failure(rank, f"rank {rank}: expected ...{table}", ename="CollectiveMismatch") for rank in (0, 1)]
    text = describe(both)
    assert text.count("The calls at") == 1
    assert text.removesuffix(TRACED).endswith("ranks 0-1: same")
    text = describe([both[0], failure(1, f"rank 1: expected ...{table}", ename="CollectiveMismatch", line=9)])
    assert text.count("The calls at") == 1
    assert text.removesuffix(TRACED).endswith("raised on rank 0\nrank 1: the same, at line 9")


def test_ranks_that_part_are_told_with_the_counts_of_their_calls() -> None:
    waited = failure(0, "rank 0: allreduce stopped because rank 1 has left", line=7, aborted=True)
    assert (
        describe([waited], calls={0: 101, 1: 100, 2: 100})
        .removesuffix(TRACED)
        .endswith("101 calls on rank 0, 100 on ranks 1-2; they part at line 7")
    )
    assert (
        describe([waited], calls={0: 1, 1: 0})
        .removesuffix(TRACED)
        .endswith("1 call on rank 0, 0 on rank 1; they part at line 7")
    )
    assert "calls" not in describe([waited], calls={0: 4, 1: 4})
    assert "calls" not in describe([failure(0), waited], calls={0: 4, 1: 3}), "a rank that raised is the reason"


def test_a_misspelt_name_has_the_one_that_it_may_mean() -> None:
    """Python says so at its prompt, and where a traceback is written from 3.12 on."""
    for code, near in (
        ("modl(3)", "model"),
        ("import math\nmath.sqr(2)", "sqrt"),
        ("math.zzq", ""),
        ("zzq", ""),
    ):
        with pytest.raises((NameError, AttributeError)) as raised:
            exec(compile(code, "<cell of run r1>", "exec"), {"model": print, "math": math})
        text = describe([failure_record.describe(raised.value, "r1", 0, "<cell of run r1>", aborted=False)])
        assert text.count("Did you mean") == bool(near)
        assert f"Did you mean: '{near}'?" * bool(near) in text
