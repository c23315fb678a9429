"""What a lesson says with numbers, and the checks behind it.

Behind such a sentence stands a comment, which no reader sees:

    Two ranks need half of the steps. <!-- check: measured["steps"] == 90 and code("batch_size=16") -->

``check`` is an expression that holds: of what the last cell of the lesson has ``measured``, of the ``seconds`` that its
cells took, of ``code(...)``, which says whether a piece stands in its cells, and of constants of its cells. All numbers
of the sentence are in it. One of a time or rate (``seconds``, ``measured["ring, ms"]``, ``measured["core, GB/s"]``), or
of why a rank is slow (``measured["straggler: why"]``), is left out where other programs keep the machine busy.
``given`` marks a sentence of a question that only assumes its numbers, ``source`` one whose numbers others have found.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_notebook.config import config
from ring_notebook.torch import LocalSteps

__all__ = ["Claim", "claims", "claims_of", "code_of", "failing"]

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

_COMMENT = re.compile(r"<!--\s*(check|given|source)\s*(?::\s*(.*?))?\s*-->", re.DOTALL)
_BLOCKS = (
    re.compile(r"```.*?```|<pre>.*?</pre>|\$\$.*?\$\$", re.DOTALL),
    re.compile(r"^\*Open in .*?\*$|^(?: {4}.*\n?)+", re.MULTILINE),
)
_SPANS = re.compile(r"\$[^$\n]+\$|`[^`]*`|<code>.*?</code>|\]\([^)]*\)|<[^>]*>")
_YEAR = re.compile(r"(?<=[a-z.,] )(?:19|20)\d\d\b|\((?:19|20)\d\d\)")  # of a paper
_LABEL = re.compile(
    r"\b(?:[Rr]anks?|stage|[Nn]otebooks?|step|row|micro-batch|chunk|seed) \d+(?:(?:,| and| to|-) ?\d+)*"
)
_ITEM = re.compile(r"^(?:\| )?\**\d+(?:\.(?!\d)| \|)")  # of a list or a table
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_ENDING = re.compile(r"(?<=\d)(?:st|nd|rd|th|-\w+)\W*$")
_WORDS = re.compile(r"\b(?:fiftieth|hundredth|thousandth|(?:two|three|four|five|six|seven|ten) times)\b")
_TIMED = re.compile(r"\bseconds\b|measured\[\"[^\"]*\b(?:ms|s|why)\b")  # in ms, in s, GB/s; why a rank is slow
_TAKES = re.compile(r"\b(?:[Cc]ells|They) take\b|\bit takes (?:half )?a\b")
# Comments stand in a text as their numbers: ⟨0⟩.
_ENDS = re.compile(r"(?<=[.?!])\s+(?=[A-Z*`\"(<\[])|(?<=⟩)\s+(?!⟨)|(?<=</summary>)\s+")  # of sentences


@dataclass(frozen=True)
class Claim:
    """A sentence with the ``numbers`` in it, and the ``checks`` behind it; ``kinds`` are those of its comments."""

    sentence: str
    numbers: tuple[str, ...]
    checks: tuple[str, ...]
    kinds: frozenset[str]
    asked: bool
    """Whether it is part of a question or its answer."""

    @property
    def lacks(self) -> str:
        """What is missing behind the sentence, or empty."""
        if "given" in self.kinds and not self.asked:
            return "only a question assumes numbers: say where they come from"
        if self.kinds & {"given", "source"}:
            return ""
        if not self.checks:
            return "no check"
        checked = {float(number) for check in self.checks for number in _NUMBER.findall(check.replace(",", " "))}
        missing = [number for number in self.numbers if float(number) not in checked]
        return f"no check of {', '.join(missing)}" if missing else ""


def claims(texts: Iterable[str]) -> list[Claim]:
    """The claims of the markdown cells of a lesson, in order."""
    found = []
    for text in texts:
        for pattern in _BLOCKS:
            text = pattern.sub("\n", text)
        comments: list[tuple[str, str]] = []

        def keep(match: re.Match[str], comments: list[tuple[str, str]] = comments) -> str:
            comments.append((match[1], " ".join((match[2] or "").split())))
            return f"⟨{len(comments) - 1}⟩"

        text = _COMMENT.sub(keep, text)
        asked = False
        for block in re.split(r"\n\s*\n|\n(?=[-|#>]|\d\. )", text):
            asked = (asked or "<details>" in block) and "</details>" not in block
            for piece in _ENDS.split(" ".join(block.split())):
                made = _claim(piece, comments, asked or "</details>" in block)
                if made is not None:
                    found.append(made)
    return found


def _claim(piece: str, comments: list[tuple[str, str]], asked: bool) -> Claim | None:
    own = [comments[int(number)] for number in re.findall(r"⟨(\d+)⟩", piece)]
    sentence = re.sub(r"⟨\d+⟩", "", piece).strip()
    bare = _ITEM.sub("", _SPANS.sub(" ", sentence).strip())
    bare = _LABEL.sub("", _YEAR.sub("", "" if bare.startswith("#") else bare))
    # In the token of a formula, such as 2(N-1), or of a name, such as FSDP2, is a letter.
    tokens = [token for token in bare.split() if not re.search(r"[^\W\d_]", _ENDING.sub("", token))]
    numbers = [number.replace(",", "").strip(".") for token in tokens for number in _NUMBER.findall(token)]
    if not (numbers or own or _WORDS.search(bare) or _TAKES.search(bare)):
        return None
    checks = tuple(text for kind, text in own if kind == "check")
    return Claim(sentence, tuple(numbers), checks, frozenset(kind for kind, _ in own), asked)


def constants(sources: Iterable[str]) -> dict[str, Any]:
    """The names that cells give to literals, such as ``EPOCHS, N = 30, 32``."""
    found: dict[str, Any] = {}
    for source in sources:
        try:
            statements = ast.parse(re.sub(r"^%.*$", "", source, flags=re.MULTILINE)).body
        except SyntaxError:  # a magic within a block
            continue
        for one in statements:
            if isinstance(one, ast.Assign) and len(one.targets) == 1:
                target, value = one.targets[0], one.value
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                try:
                    values = ast.literal_eval(value)
                except ValueError:
                    continue
                for name, literal in zip(names, values if isinstance(target, ast.Tuple) else [values], strict=True):
                    if isinstance(name, ast.Name):
                        found[name.id] = literal
    return found


def failing(
    lesson: Iterable[Claim],
    sources: Iterable[str],
    measured: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> list[str]:
    """The checks that do not hold, each with its sentence. Those of what is None are left out.

    Without ``seconds`` so are those of every other time and rate.
    """
    from sklearn.datasets import load_digits  # a second, that collecting tests would pay

    cells = list(sources)
    known = {"measured": measured, "seconds": seconds}
    names: dict[str, Any] = {
        **{name: getattr(math, name) for name in ("ceil", "isclose", "log", "sqrt")},
        **constants(cells),
        **{name: value for name, value in known.items() if value is not None},
        "LocalSteps": LocalSteps,
        "config": config,
        "load_digits": load_digits,
        "code": lambda piece: any(piece in cell for cell in cells),
        "code_of": lambda name, piece: any(piece in cell for cell in code_of(name)),
    }
    wrong = []
    for claim in lesson:
        for check in claim.checks:
            if any(value is None and re.search(rf"\b{name}\b", check) for name, value in known.items()):
                continue
            if seconds is None and _TIMED.search(check):
                continue
            try:
                held = eval(check, dict(names))
            except Exception as error:
                held, check = False, f"{check} ({type(error).__name__}: {error})"
            if not held:
                wrong.append(f"{claim.sentence}\n    {check}")
    return wrong


def code_of(name: str) -> list[str]:
    """The code cells of a notebook."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def claims_of(name: str) -> list[Claim]:
    """Those of a notebook."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return claims("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
