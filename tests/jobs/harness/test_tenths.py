"""Few cases of a test run in `make test`, a tenth of the others in CI, which says what it ran and ends in time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.gone_words import expected_words, git
from harness.tenths import tenth_of, tenth_of_date
from jobs.harness.test_lanes import project, run

MANY = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_case(number):
    pass
def test_usual():
    assert False
"""


CASES = """
import pytest
@pytest.mark.parametrize("number", range(9))
def test_case(number):
    pass
"""


@pytest.mark.slow
def test_of_a_test_of_processes_few_cases_run(tmp_path: Path) -> None:
    folder = project(tmp_path, {"unit/test_a.py": CASES, "native/test_b.py": CASES})
    code, said = run(folder)
    assert code == 0, said
    passed = re.findall(r"PASSED tests/(\w+)/test_\w\.py::test_case\[(\d)\]", said)
    assert sorted(passed) == [*(("native", number) for number in "8"), *(("unit", str(at)) for at in range(9))]
    code, said = run(folder, "tests/native/test_b.py::test_case[5]")
    assert (code, "1 passed" in said) == (0, True), "a case that is asked for by its name runs"


PRODUCT = """
import pytest
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize(("letter", "sign"), [("a", 1), ("b", -1), ("a", -1)])
def test_case(number, letter, sign):
    assert number != 4
"""


@pytest.mark.slow
def test_of_a_product_each_value_runs_and_a_case_that_fails_runs_again(tmp_path: Path) -> None:
    folder = project(tmp_path, {"native/test_a.py": PRODUCT})
    code, said = run(folder, "-m", "slow or not slow")
    ran = {(sign, int(number)) for sign, number in re.findall(r"(?:PASSED|FAILED) \S+\[(\S+)-(\d)\]", said)}
    assert (code, 9 <= len(ran) <= 11) == (1, True), said
    assert ({sign for sign, _ in ran}, {number for _, number in ran}) == ({"a-1", "b--1", "a--1"}, {*range(9)})
    code, said = run(folder, "-m", "slow", "-p", "cacheprovider")
    failed = {*re.findall(r"FAILED (\S+)", said)}
    assert (code, len(failed) > 0) == (1, True), said
    code, said = run(folder, "-m", "slow or not slow", "-p", "cacheprovider", "--last-failed")
    assert (code, {*re.findall(r"FAILED (\S+)", said)}, "PASSED" in said) == (1, failed, False), said


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return project(tmp_path, {"unit/test_a.py": MANY, "notebook/test_b.py": MANY, "workshop/test_c.py": MANY})


@pytest.mark.slow
def test_a_tenth_runs_and_what_did_not_run_is_said(many: Path) -> None:
    files = ("tests/unit/test_a.py", "tests/notebook/test_b.py")
    all_of_them = [f"{file}::test_case[{number}]" for file in files for number in range(40)]
    code, said = run(many, "-m", "slow", "--tenth", "4")
    assert code == 0, said
    assert sorted(re.findall(r"PASSED (\S+)", said)) == sorted(one for one in all_of_them if tenth_of(one) == 4)
    found = re.search(r"= tenth 4 =+\nran: (.*)\nno time was left: none\nin the other nine: (.*)\n", said)
    assert found is not None
    ran, others = ({room: int(count) for room, count in map(str.split, text.split(", "))} for text in found.groups())
    assert {room: ran[room] + others[room] for room in ran} == {"notebook": 40, "unit": 40}


@pytest.mark.slow
def test_no_test_begins_when_there_is_no_time(many: Path) -> None:
    code, said = run(many, "-m", "slow", "--tenth", "4", "--minutes", "0")
    assert code == 0
    assert "ran: none\n" in said
    assert re.search(r"no time was left: notebook \d+, unit \d+\n", said)


# Of a message in the package, then and now, and the tests of it.
MESSAGES = """raise TypeError(
    f"strategy={kind!r} takes one model and {what} "
    f"optimizer, got {count}"
)"""
EXPECTS = f'{MANY}\nEXPECTED = r"one model and one optimizer, got \\d+"\n'


@pytest.mark.slow
def test_tests_that_expect_words_of_an_older_version_all_run(tmp_path: Path) -> None:
    folder = project(tmp_path, {"unit/test_a.py": MANY, "unit/test_b.py": EXPECTS})
    source = folder / "ring_notebook" / "prepared.py"
    source.parent.mkdir()
    (folder / "native").mkdir()
    git(folder, "init", "--quiet")
    for number, what in enumerate(("one", "its")):
        source.write_text(MESSAGES.replace("{what}", what))
        git(folder, "add", ".")
        git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", str(number))
        code, said = run(folder, "-m", "slow", "--tenth", "commit")
        assert code == 0, said
        ran = [len(re.findall(rf"PASSED tests/unit/test_{name}.py", said)) for name in "ab"]
        assert ran[0] < 20, said
        assert (ran[1] == 40) is (what == "its"), said


def test_words_are_compared_without_values_and_signs() -> None:
    (of_package,) = (expected_words('f"rank {rank}: lost {size_text(n)} of " \n f"memory"'),)
    assert of_package == {"rank lost of", "lost of memory"}
    assert expected_words(r'match=r"rank \d+: lost .* of memory"') == of_package


def test_every_test_is_in_one_tenth() -> None:
    assert {tenth_of(f"tests/unit/test_a.py::test_case[{number}]") for number in range(100)} == {*range(10)}


@pytest.mark.parametrize("days", [1, 7])
@pytest.mark.parametrize("hour", [0, 11.5, 23.9])
def test_who_lands_at_the_same_hour_comes_to_all(days: int, hour: float) -> None:
    assert {tenth_of_date(int((days * landing * 24 + hour) * 3600)) for landing in range(10)} == {*range(10)}
