"""Every notebook of the workshop has the parts that readers, and the programs that run it, expect."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from install.environments import with_requirements
from ring_notebook.notebook.panel.hints import Lint
from ring_notebook.notebook.record.run_view import RunState
from workshop.claims import claims, claims_of, code_of, failing

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
INDEX = "00_index"
REPOSITORY = "ring-notebook/ring-notebook"
PLACES = (
    "https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name}.ipynb",
    "https://kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/main/notebooks/{name}.ipynb",
    "https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{name}.ipynb",
)
INSTALL = """\
import importlib.util

if importlib.util.find_spec("ring_notebook") is None:  # on Colab and Kaggle
    %pip install -q "ring-notebook[demo] @ git+https://github.com/{repository}"
%load_ext ring_notebook
""".replace("{repository}", REPOSITORY)
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
GALLERY = sorted(f"gallery/{path.stem}" for path in NOTEBOOKS.glob("gallery/*.ipynb"))


def cells(name: str) -> list[dict[str, Any]]:
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found]


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_elsewhere(name: str) -> None:
    title = cells(name)[0]["source"]
    links = [place.format(repository=REPOSITORY, name=name) for place in PLACES]
    assert [link for link in links if f"({link})" not in title] == []


def test_the_index_lists_all() -> None:
    text = "\n".join(cell["source"] for cell in cells(INDEX))
    assert [*re.findall(r"\]\((\w+)\.ipynb\)", text)] == [name for name in NAMES if name != INDEX]


@pytest.mark.parametrize("name", sorted({*NAMES} - {INDEX}))
def test_its_parts(name: str) -> None:
    parts = cells(name)
    code = [cell for cell in parts if cell["cell_type"] == "code"]
    assert code[0]["source"].startswith(INSTALL.strip())
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    tags = [tag for cell in code for tag in cell["metadata"].get("tags", ()) if tag != "raises-exception"]
    exercises = len(tags) // 2
    assert exercises
    assert tags == [*["exercise", "check"] * exercises, "measured"]
    assert all("..." in cell["source"] for cell in code if "exercise" in cell["metadata"].get("tags", ()))
    text = "\n".join(cell["source"] for cell in parts if cell["cell_type"] == "markdown")
    assert text.count("<summary>Solution</summary>\n\n```python\n") == exercises
    assert text.count("<details>") == text.count("</details>") == exercises + 3  # questions
    assert all(len(cell["source"].splitlines()) < 50 for cell in parts)
    assert code[-1]["source"] == "%ring stop"


@pytest.mark.parametrize("name", GALLERY)
def test_a_gallery_installs_what_a_lesson_does(name: str) -> None:
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    assert code[0]["source"].startswith(INSTALL.strip())
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.parametrize("name", [*NAMES, *GALLERY])
def test_what_its_cells_do_with_gpus_gets_no_hint(name: str) -> None:
    """As that a rank's own GPU is not the one of its number, or that batches stay on the CPU."""
    view = RunState(2, 0.0).view(1.0)
    sources = [one.partition("\n")[2] for one in code_of(name) if one.startswith("%%ringtrain")]
    hints = [{*Lint(source, gpus=True).hints(view)} - {*Lint(source).hints(view)} for source in sources]
    assert [one for one in hints if one] == []


def test_it_leaves_the_server_that_shows_it_as_it_is() -> None:
    """On Colab and Kaggle: pip would replace what the page is served by."""
    wanted = re.findall(r'"(\S+) @', INSTALL)[0]
    brought = {canonicalize_name(one) for one in with_requirements(wanted)}
    assert brought & {"jupyter-server", "jupyterlab", "nbclassic", "notebook"} == set()


_COLLECTIVE = re.compile(r"(?:grouped_)?(?:all|broad|barrier|reducescatter|init_process_group|prepare)\w*")


def calls_at_once(node: ast.AST) -> list[str]:
    """The names of the functions that a cell calls itself, outside of functions that it defines."""
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        return []
    below = [name for child in ast.iter_child_nodes(node) for name in calls_at_once(child)]
    named = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    )
    return [*below, node.func.attr] if named and node.func.value.id in ("ring", "dist", "hvd") else below


@pytest.mark.parametrize("name", [*NAMES, *GALLERY])
def test_what_a_healed_rank_runs_alone_needs_no_other_rank(name: str) -> None:
    setup = [cell for cell in code_of(name) if re.match(r"%%ringtrain.*--setup", cell)]
    found = [call for cell in setup for call in calls_at_once(ast.parse(cell.partition("\n")[2]))]
    assert [call for call in found if _COLLECTIVE.fullmatch(call)] == []


@pytest.mark.parametrize("name", [*NAMES, *GALLERY])
def test_each_number_of_a_lesson_has_a_check(name: str) -> None:
    """Of what it has measured, which `make workshop` knows; what its cells and arithmetic say is checked here."""
    lesson = claims_of(name)
    assert {claim.sentence: claim.lacks for claim in lesson if claim.lacks} == {}
    assert failing(lesson, code_of(name)) == []


def kept(name: str) -> tuple[dict[str, Any], float]:
    """What the last cell of a lesson had measured when its outputs were kept, and the seconds that its cells tell."""
    path = NOTEBOOKS.parent / "docs" / "outputs" / f"{Path(name).name}.json"
    outputs = [one for shown in json.loads(path.read_text()).values() for one in shown]
    texts = ["".join(one.get("text") or one.get("data", {}).get("text/plain", "")) for one in outputs]
    *_, measured = (text for text in texts if text.startswith("{"))
    times = re.findall(r"^(?:Started|\w+ · ).*?(?:(\d+):)?([\d.]+)(?: s\b|(?<=:\d\d)(?: ·|$))", "\n".join(texts), re.M)
    return ast.literal_eval(measured), sum(60 * float(minutes or 0) + float(seconds) for minutes, seconds in times)


@pytest.mark.parametrize("name", [*(name for name in NAMES if name != INDEX), *GALLERY])
def test_what_a_lesson_says_is_so_in_its_kept_outputs(name: str) -> None:
    measured, seconds = kept(name)
    assert failing(claims_of(name), code_of(name), measured, seconds) == []


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("It takes 7 steps.", "no check"),
        ("It takes 7 steps. <!-- check: 7 == 7 -->", ""),
        ("It takes 7 to 1,437 steps. <!-- check: 7 == 7 -->", "no check of 1437"),
        (
            "It takes 7 steps. Rank 1 has FSDP2 and 2(N-1) `8` of $9$ (Dean et al. 2012). <!-- check: True -->",
            "no check",
        ),
        ("The cells take a minute.", "no check"),
        ("It takes 7 steps. <!-- given -->", "only a question assumes numbers: say where they come from"),
        ("<details>\n<summary>1. Are 7 steps enough? <!-- given --></summary>\n\nNo.\n</details>", ""),
    ],
)
def test_which_sentences_need_a_check(text: str, lacks: str) -> None:
    assert claims([text])[0].lacks == lacks


def test_a_check_that_does_not_hold_is_told_with_its_sentence() -> None:
    lesson = claims(
        ['Two ranks need 7 steps. <!-- check: measured["steps"] == 7 -->', 'Of 3. <!-- check: N == 3 and code("x") -->']
    )
    assert failing(lesson, ["%%ringtrain\nN = 3\nx = 1"], {"steps": 7}) == []
    assert failing(lesson, ["N = 4\nx"], {"steps": 8}) == [
        'Two ranks need 7 steps.\n    measured["steps"] == 7',
        'Of 3.\n    N == 3 and code("x")',
    ]
    assert "KeyError" in failing(lesson[:1], [], {})[0]
    assert failing(lesson[:1], []) == [], "not measured"


def test_times_and_rates_are_checked_on_an_idle_machine_only() -> None:
    for key in ("ring, ms", "wait in a pass, s", "core, GB/s", "samples/s of two / of one", "straggler: why"):
        lesson = claims([f'Below 7. <!-- check: measured["{key}"] < 7 -->'])
        assert failing(lesson, [], {key: 8}) == []
        assert len(failing(lesson, [], {key: 8}, 60.0)) == 1
    steps = claims(['It takes 7 steps. <!-- check: measured["steps of two"] == 7 -->'])
    assert len(failing(steps, [], {"steps of two": 8})) == 1
