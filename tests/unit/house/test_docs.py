"""What the documents name exists: make targets, links, files, settings, commands and their options."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from harness.doc_tables import table
from harness.programs import ran
from libraries.programs import PEERS, SCRIPTS
from ring_notebook import __version__, errors
from ring_notebook.analysis import slow_ranks_and_links
from ring_notebook.config import Config
from ring_notebook.launch import ringrun_options
from ring_notebook.notebook.magics.commands import MAGICS, RING
from ring_notebook.rank.rendezvous import JOB

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "tasks").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Read while the pictures of the package are taken, not by a process that uses it; and one of an earlier version.
OTHERS = {"RING_PICTURES", "RING_SITE_MPI"}
# The pages whose `name.py` is a file of ours; elsewhere it may be a user's.
OF_THE_CODE = {"architecture.md", "core.md", "decisions.md", "CONTRIBUTING.md"}


def offenders(documents: list[Path], unknown: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """By document, what it names and does not exist."""
    found = {str(path.relative_to(ROOT)): sorted(unknown(path)) for path in documents}
    return {name: names for name, names in found.items() if names}


def test_make_targets_exist() -> None:
    def unknown(path: Path) -> set[str]:
        return (
            set(re.findall(r"(?:`| {4}|^|run: (?:sudo )?)make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE))
            - TARGETS
        )

    workflows = (ROOT / ".github" / "workflows").glob("*.yml")
    assert offenders([*DOCUMENTS, ROOT / ".ci" / "run", *workflows], unknown) == {}


def test_links_lead_somewhere() -> None:
    def unknown(path: Path) -> list[str]:
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text())
        return [f"{target}#{anchor}" for target, anchor in links if not leads(path, target, anchor)]

    assert offenders(DOCUMENTS, unknown) == {}


def leads(path: Path, target: str, anchor: str) -> bool:
    """Whether a link in ``path`` leads to a file, and to a heading of it, as GitHub makes anchors of headings."""
    page = path.parent / target if target else path
    if not anchor:
        return page.exists()
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_settings_exist() -> None:
    known = {f"RING_{field.name.upper()}" for field in fields(Config)} | OTHERS | set(JOB)
    assert offenders(DOCUMENTS, lambda path: set(re.findall(r"\bRING_[A-Z_]+\b", path.read_text())) - known) == {}


def test_folders_and_files_in_code_font_exist() -> None:
    """A path from the root, or one of the places below; a name alone is that of some file of ours."""
    places = [ROOT / place for place in ("", "ring_notebook", "tests", "native", "native/include/ring", "native/src")]
    tracked = ran(["git", "ls-files"], cwd=ROOT, check=True).stdout
    names = {Path(name).name for name in tracked.split()}

    def unknown(path: Path) -> list[str]:
        text = path.read_text()
        paths = re.findall(r"`((?:[a-z_0-9]+/)+[A-Za-z_0-9.]*)`", text)
        alone = re.findall(r"`([a-z_0-9]+\.(?:cpp|hpp))`", text)
        if path.name in OF_THE_CODE:
            alone += re.findall(r"`([a-z_0-9]+\.py)`", text)
        lost = [name for name in paths if not any((place / name).exists() for place in (*places, path.parent))]
        return [*lost, *(name for name in alone if name not in names)]

    assert offenders(DOCUMENTS, unknown) == {}


def test_names_of_the_code_exist() -> None:
    """A name of the pages of the code, such as ``hold_deadlines`` or ``NameTable``, and of a test on any page."""
    folders = ["ring_notebook", "native", "tests", "docs/*.py", "benchmarks/*.py"]
    listed = ran(["git", "ls-files", *folders], cwd=ROOT, check=True).stdout
    sources = [ROOT / name for name in listed.split() if name.endswith((".py", ".pyi", ".cpp", ".hpp"))]
    known = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources if path.exists())))

    def unknown(path: Path) -> set[str]:
        names = set(re.findall(r"`([A-Za-z]\w*(?:_\w+|[a-z][A-Z]\w*))(?:\(\))?`", path.read_text()))
        return (names if path.name in OF_THE_CODE else {name for name in names if name.startswith("test_")}) - known

    assert offenders(DOCUMENTS, unknown) == {}


def test_commands_have_the_options_they_are_shown_with() -> None:
    """Of ``ringrun``, ``%ring``, ``%%ringtrain`` and ``%%ringscale``, where a piece of code begins with them."""

    def unknown(path: Path) -> list[str]:
        text = path.read_text()
        pieces = [*re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text), *re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)]
        old = path.name == "CHANGELOG.md"  # it has the names of each release
        return [piece for piece in pieces if not is_a_command(re.sub(r"[][\\]", " ", piece).split(), old)]

    assert offenders(DOCUMENTS, unknown) == {}


def is_a_command(words: list[str], old: bool = False) -> bool:
    """Whether it has the options in ``words``, which may also be something else than one of our commands."""
    command, *rest = words or [""]
    if command == "ringrun":
        known = set(ringrun_options._parser()._option_string_actions)
        rest = rest[: next((at for at, word in enumerate(rest) if word in ("python", "train.py", "...")), len(rest))]
    elif command.lstrip("%") in MAGICS and rest:
        magic = MAGICS[command.lstrip("%")]
        named, rest = magic.find(magic.renamed(rest)[0] if old else rest)
        if named is RING and rest[0] != "help":
            return False
        known = {flag for option in named.all_options for flag in option.flags}
    else:
        return True
    return {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} <= known


def test_an_option_that_does_not_exist_is_noticed() -> None:
    wrong = ["%ring begin", "%ring heal --all", "%ring snapshots save --all", "%%ringtrain --size 3"]
    wrong += ["ringrun --ranks 3 train.py"]
    assert [line for line in wrong if is_a_command(line.split())] == []
    assert is_a_command(["ringrun", "-np", "2", "train.py", "--ranks", "3"])


def test_the_version_is_the_same_everywhere() -> None:
    patterns = {
        "CITATION.cff": r"^version: (.*)$",
        "conda/recipe.yaml": r"^  version: (.*)$",
        "CHANGELOG.md": r"^## \[([^]]*)\] - (?:unreleased|\d{4}-\d\d-\d\d)$",
    }
    found = {name: re.search(one, (ROOT / name).read_text(), re.MULTILINE) for name, one in patterns.items()}
    assert {name: match and match[1] for name, match in found.items()} == dict.fromkeys(patterns, __version__)


def test_a_release_of_the_changelog_fits_a_screen() -> None:
    _, *releases = re.split(r"^(?=## )", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert {text.splitlines()[0]: len(text.splitlines()) for text in releases if text.count("\n") > 60} == {}


def test_every_target_is_explained_by_make() -> None:
    text = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"echo 'make ([a-z-]+)", text))
    assert explained == TARGETS - {"help"}


def test_what_is_made_from_the_code_is_what_the_code_makes() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    made = {"SETTINGS": "settings", "MAGICS_PAGE": "magics", "AGENTS_PAGE": "agents", "STUB": "stub"}
    for path, text in made.items():
        assert written[path].read_text() == written[text](), "`python docs/reference.py` writes it; commit that"


def test_outputs_of_notebooks_are_not_older_than_their_code() -> None:
    """``make outputs`` runs the notebooks and keeps what they show."""
    assert runpy.run_path(str(ROOT / "docs" / "outputs.py"))["stale"]() == []


def test_kept_outputs_name_no_folder_of_who_kept_them() -> None:
    """What a library says of its files is no part of a lesson: keep them in an environment where it is silent."""
    own = re.compile(rf"{re.escape(str(ROOT))}|site-packages|/(?:root|home)/")
    kept = (ROOT / "docs" / "outputs").glob("*.json")
    assert {path.name for path in kept if own.search(path.read_text(encoding="utf-8"))} == set()


def test_causes_in_pages_and_kept_outputs_are_those_of_the_code() -> None:
    """Pages name a slow rank by sentences of `slow_ranks` only; one has all. Line breaks and quotes do not matter."""
    causes = {why for why, _ in slow_ranks_and_links.CAUSES.values()}
    assert {row[0] for row in table("tasks/slow.md", "| The sentence says that")} == causes

    def unknown(path: Path) -> set[str]:
        text = re.sub(r"\s+", " ", path.read_text())
        return set(re.findall(r"\branks? [\d, -]+ (?:is|are) (?:over )?[\d.]+x slower ([^;<>]*)", text, re.I)) - causes

    pages = [*DOCUMENTS, *(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "docs" / "outputs").glob("*.json")]
    assert offenders(pages, unknown) == {}


def test_the_table_of_libraries_has_what_is_run() -> None:
    """`tests/libraries/test_peers.py` runs its rows."""
    assert [row[0] for row in table("distributed.md", "| Of two ranks |")] == [*SCRIPTS, *PEERS]


def test_every_error_has_its_cause_and_cure() -> None:
    headings = " ".join(re.findall(r"^## (.*)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    classes = {name for name, one in vars(errors).items() if isinstance(one, type)} - {"RingError"}
    assert {name for name in classes if name not in headings} == set()


def test_messages_on_the_page_of_errors_are_those_of_the_code() -> None:
    """Each part of a quoted message between its values, as the parts of one literal; "…" stands for a value."""
    sources = [*(ROOT / "ring_notebook").rglob("*.py"), *(ROOT / "native").rglob("*.?pp")]
    sources.append(ROOT / "native" / "CMakeLists.txt")
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sources))
    quotes = re.findall(r'"([^"]+)"', " ".join((ROOT / "docs" / "errors.md").read_text().split()))
    parts = {part.strip(" .,") for quote in quotes for part in re.split("…|RANK", quote)}
    assert len(parts) > 40
    assert {part for part in parts if part not in code} == set()
