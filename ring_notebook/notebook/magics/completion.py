"""Names of the ranks in the notebook: completion, help, ``ring`` in its own cells, and advice on a NameError.

Completion also knows the commands and options of the magics.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache, wraps
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.errors import RingError
from ring_notebook.frameworks import default
from ring_notebook.notebook.magics.commands import MAGICS
from ring_notebook.notebook.session.cells import runs_on_ranks
from ring_notebook.notebook.session.known_names import help_on_rank_0, names_of_ranks, names_on_rank_0
from ring_notebook.notebook.session.session import Session
from ring_notebook.text.parsing import parse

if TYPE_CHECKING:
    from IPython.core.completer import Completion, CompletionContext

_CELL = re.compile(r"\s*%%ring(train|scale)\b.*\n")  # the lines after it run on the ranks


def register(shell: InteractiveShell, session: Session) -> None:
    """Let ``shell`` complete and explain names of the ranks, and bind ``ring`` where the user has not."""
    _complete(shell, session)
    _inspect(shell, session)
    _advise_on_missing(shell, session)
    if "ring" not in shell.user_ns:
        shell.push({"ring": _Ring()}, interactive=False)


class _Ring:
    """``ring`` in cells of the notebook itself: its names have their help and signatures, and cannot be called.

    It lists them without an import of the framework, which takes longer than a front end waits for completions.
    ``inside``: the module of the face that this is, such as ``.elastic``.
    """

    _imports = True  # whether it may import its framework

    def __init__(self, inside: str = "") -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if _source(_imports_of(self._module()).get(name, "")) is not None:
            return _Ring(f"{self._inside}.{name}")
        value = getattr(self._imported(), name)
        return _refusing(name, value) if callable(value) and not isinstance(value, type) else value

    def __dir__(self) -> list[str]:
        names = _public_names(self._module())
        return list(self._imported().__all__) if names is None else names

    def __repr__(self) -> str:
        return f"<ring{self._inside}: for cells that begin with %%ringtrain>"

    def _module(self) -> str:
        return f"{default().face}{self._inside}"

    def _imported(self) -> Any:
        try:
            if not self._imports and default().face not in sys.modules:
                raise ImportError("not imported while names are completed: it takes too long")
            return import_module(self._module())
        except ImportError as error:  # the framework is missing here; engines may have it
            raise AttributeError(f"ring is for cells that begin with %%ringtrain ({error})") from error


def _source(module: str) -> Path | None:
    """The file of a module, found without an import of the packages that it is in; None if it is not there."""
    package, *inside = module.split(".")
    spec = find_spec(package) if package else None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        place = Path(folder, *inside)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@lru_cache
def _statements(module: str) -> list[ast.stmt]:
    """The statements of a module's source; none if it is not found."""
    file = _source(module)
    return parse(file.read_text(encoding="utf-8")).body if file is not None else []


def _imports_of(module: str) -> dict[str, str]:
    """The origin of each name that a module imports by ``from``."""
    found: dict[str, str] = {}
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _public_names(module: str) -> list[str] | None:
    """``__all__`` of a module, read from its source, with what it adds of other modules; None without one."""
    names: list[str] | None = None
    for node in _statements(module):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                with suppress(ValueError):  # it is computed
                    names = list(ast.literal_eval(value))
            case ast.AugAssign(target=ast.Name(id="__all__"), value=ast.Attribute(value=ast.Name(id=other))):
                more = _public_names(_imports_of(module).get(other, ""))
                names = None if names is None or more is None else [*dict.fromkeys([*names, *more])]
    return names


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise RingError(
            f"ring.{name}() runs on the ranks, and this cell runs in the notebook; put %%ringtrain on its first line"
        )

    return refuse


def _inspect(shell: InteractiveShell, session: Session) -> None:
    """Have ``shell`` ask rank 0 for help on names that it does not know itself."""
    own: Callable[..., dict[str, str]] = shell.object_inspect_mime

    def inspect(oname: str, *args: Any, **kwargs: Any) -> dict[str, str]:
        try:
            return own(oname, *args, **kwargs)
        except KeyError:
            if text := help_on_rank_0(session, oname):
                # Without HTML the kernel says that nothing is found, although it drops it for most front ends.
                return {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
            raise

    shell.object_inspect_mime = inspect  # type: ignore[method-assign]


def _advise_on_missing(shell: InteractiveShell, session: Session) -> None:
    """Make a NameError of ``shell`` say how to bring the variable here, if the ranks have it."""

    def show(
        shell: InteractiveShell,
        kind: type[BaseException],
        error: NameError,
        traceback: TracebackType,
        tb_offset: int | None = None,
    ) -> None:
        name, here = error.name or "", {*shell.user_ns, *dir(builtins)}
        # The name itself, or one closer than all of this notebook: Python suggests those.
        for near in get_close_matches(name, {*names_on_rank_0(session)} | here, n=1):
            if near == name:
                error.args = (f"{error}; the ranks have it: `%ring pull {name}` brings it here",)
            elif near not in here:
                error.args = (f"{error}. Did you mean: {near!r}, which the ranks have? `%ring pull {near}`",)
        shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)

    shell.set_custom_exc((NameError,), show)


def _complete(shell: InteractiveShell, session: Session) -> None:
    """Add the options of the magics and the names of the ranks to the completer of ``shell``, from IPython 8.6 on."""
    try:
        from IPython.core.completer import SimpleCompletion
    except ImportError:  # an older one, as on Colab, tells a matcher nothing of the cell
        return

    def complete_ring(context: CompletionContext) -> dict[str, object]:
        token = context.token
        words, own = _words(context.text_until_cursor.lstrip(), token, session)
        on_ranks = _in_cell(context) or (session.default and runs_on_ranks(context.full_text))
        of_ring = token.startswith("ring.") and isinstance(shell.user_ns.get("ring"), _Ring)
        names = names_of_ranks(session, token) if token and not own and (on_ranks or of_ring) else []
        return {
            "completions": [
                *(SimpleCompletion(word, type="option") for word in words),
                *(SimpleCompletion(name, type="rank") for name in names),
            ],
            # Then no other completions: after a dot they would be the same names once more.
            "suppress": bool(words) or own or (bool(names) and "." in token),
        }

    own = shell.Completer.completions

    def completions(text: str, offset: int) -> Iterator[Completion]:
        _Ring._imports = False
        try:
            yield from own(text, offset)
        finally:
            _Ring._imports = True

    shell.Completer.completions = completions  # type: ignore[method-assign]
    complete_ring.matcher_api_version = 2  # type: ignore[attr-defined]
    shell.Completer.custom_matchers.append(complete_ring)


def _words(line: str, token: str, session: Session) -> tuple[list[str], bool]:
    """Completions of ``token``, the end of a magic's line, and whether nothing else can follow."""
    magic, *words = line.split() or [""]
    if magic.lstrip("%") not in MAGICS or not line.startswith("%") or not (words or line[-1].isspace()):
        return [], False
    begun = "" if line[-1].isspace() else words.pop()
    of_magic = MAGICS[magic.lstrip("%")]
    command, given = of_magic.find(of_magic.renamed(words)[0])
    found, own = command.complete(given, begun, session)
    # The token is only the end of a word such as ``run@80``.
    return [word[len(begun) - len(token) :] for word in found if begun.endswith(token)], own


def _in_cell(context: CompletionContext) -> bool:
    before = context.full_text.split("\n")[: context.cursor_line]
    return _CELL.match("\n".join([*before, ""])) is not None
