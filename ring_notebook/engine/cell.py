"""The source of a cell, compiled so that tracebacks show its lines, and executed in the user's namespace."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from operator import length_hint
from types import CodeType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from ring_notebook.core.native import core
from ring_notebook.engine.own_stack import main_frames
from ring_notebook.frameworks import names_in, with_code_of_magics
from ring_notebook.text.error_text import cell_file
from ring_notebook.text.parsing import parse

# Number of cells whose source is kept, for tracebacks through functions that they defined.
_KEPT = 100
_files: deque[str] = deque()
# One loop for all cells that use `await`: tasks that one cell has started continue in the next that waits.
_loop: asyncio.AbstractEventLoop | None = None
_SECONDS_TO_END = 5.0  # of a cell that is cancelled

_LOOPS = "__ring_loops__"
_COUNTED = (list.__iter__, tuple.__iter__, range.__iter__)


@dataclass(frozen=True)
class Begin:
    """Where a cell begins that continues another run: index of the statement, line, and whether that iteration is done.

    ``items``: the index of the present item of each loop around the line, the outermost first; -1 where the loop is
    over no list, tuple or range. ``behind``: the innermost of these loops continues after its item.
    """

    statement: int
    line: int
    behind: bool = False
    items: Sequence[int] = ()


class Cell:
    """A cell's source with IPython's own syntax (``!ls``, ``%timeit``) allowed.

    ``first_line`` is the number that the notebook shows beside the first line of ``source``. With ``begin`` it
    begins at a top-level statement, and loops around a line at the present items.
    Raises SyntaxError, which points into the cell.
    """

    def __init__(
        self, shell: InteractiveShell, source: str, run: str, first_line: int = 1, begin: Begin | None = None
    ) -> None:
        self.file = cell_file(run)
        self._shell = shell
        self._namespace: dict[str, Any] = shell.user_ns
        text = "\n" * (first_line - 1) + shell.transform_cell(source)
        # Without a loader and with mtime None, linecache keeps the entry when it checks for changed files.
        linecache.cache[self.file] = (len(text), None, text.splitlines(keepends=True), self.file)
        _files.append(self.file)
        if len(_files) > _KEPT:
            linecache.cache.pop(_files.popleft(), None)
        self.tree = parse(text, self.file)
        self.code = with_code_of_magics(self.tree)
        """What the cell executes, also in magics; to be read only."""
        self._statements: list[int] = [_begins(statement) for statement in self.tree.body]
        self._first = 0 if begin is None else begin.statement
        self._loops = _Loops(self._indices(begin) if begin is not None else {})
        self._quiet = bool(self.tree.body) and _behind(self.tree.body[-1], text).startswith(b";")

    def names(self) -> set[str]:
        """Every name that the cell uses or asks for help on, and every module that it imports."""
        return names_in(self.code) | {name for text in _asked_for(self.tree) for name in text.split(".")[:1]}

    def execute(self) -> None:
        """Run the cell; when it ends with an expression and no semicolon, show its value as a notebook would."""
        body = list(self.tree.body[self._first :])
        self._count_loops(body)
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        if body:
            self._evaluate(self._compile(ast.Module(body, type_ignores=[]), "exec"))
        if isinstance(last, ast.Expr):
            value = self._evaluate(self._compile(ast.Expression(last.value), "eval"))
            if value is not None and not self._quiet:
                assert self._shell.display_formatter is not None
                self._shell.display_pub.publish(*self._shell.display_formatter.format(value))

    def _compile(self, tree: ast.Module | ast.Expression, mode: str) -> CodeType:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(tree, self.file, mode, flags=flags, dont_inherit=True)
        return code

    def _evaluate(self, code: CodeType) -> Any:
        value = eval(code, self._namespace)
        return _wait_for(value) if code.co_flags & inspect.CO_COROUTINE else value

    def importing(self) -> str:
        """The package that the main thread imports for the cell; "" when it imports none. From any thread.

        While we import a package ourselves, that package and not ours.
        """
        found = ""
        for frame in takewhile(lambda one: one.f_code.co_filename != self.file, main_frames()):
            if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename.startswith("<frozen importlib"):
                package = str(core.locals_of_frame(frame).get("name", "")).partition(".")[0]
                found = found if package == __name__.partition(".")[0] else package
        return found

    def current_line(self) -> int:
        """The line of the cell that the main thread executes, 0 outside of the cell; any thread may call it."""
        return next(iter(self.current_lines()), 0)

    def current_statement(self) -> int:
        """The index of the cell's top-level statement that the main thread executes; -1 outside of the cell."""
        lines = self.current_lines()
        return bisect_right(self._statements, lines[-1]) - 1 if lines else -1

    def _count_loops(self, body: list[ast.stmt]) -> None:
        """Have `_Loops` begin the loops, so that their places can be told."""
        self._namespace[_LOOPS] = self._loops
        for loop in chain.from_iterable(map(_loops, body)):
            call = ast.Call(ast.Name(_LOOPS, ast.Load()), [ast.Constant(loop.lineno), loop.iter], [])
            loop.iter = ast.fix_missing_locations(ast.copy_location(call, loop.iter))

    def _loops_around(self, statement: int, line: int) -> list[ast.For]:
        """The loops of a top-level statement with ``line`` in their bodies, the outermost first."""
        there = chain.from_iterable(_loops(one) for one in self.tree.body[statement : statement + 1])
        return [loop for loop in there if loop.lineno <= line <= (loop.end_lineno or 0)]

    def _indices(self, begin: Begin) -> dict[int, int]:
        loops = [loop.lineno for loop in self._loops_around(begin.statement, begin.line)]
        indices = {line: index for line, index in zip(loops, begin.items, strict=False) if index >= 0}
        if begin.behind and loops and loops[-1] in indices:
            indices[loops[-1]] += 1
        return indices

    def place(self) -> Begin:
        lines, statement = self.current_lines(), self.current_statement()
        if not lines:
            return Begin(statement, 0)
        items = [self._loops.index(loop.lineno) for loop in self._loops_around(statement, lines[-1])]
        return Begin(statement, lines[-1], items=items)

    def functions(self) -> list[str]:
        """The functions of cells in which the main thread is; their own variables are in no namespace."""
        codes = [frame.f_code for frame in main_frames()]
        return [code.co_name for code in codes if code.co_filename in _files and code.co_name != "<module>"]

    def current_lines(self) -> list[int]:
        """The lines of the cell in the main thread's frames, the innermost first; any thread may call it."""
        frames = (frame for frame in main_frames() if frame.f_code.co_filename == self.file)
        return [frame.f_lineno for frame in frames if frame.f_lineno]  # some instructions have no line


def _asked_for(tree: ast.AST) -> Iterator[str]:
    """The names in ``name?`` and ``name??``, which IPython turns into calls of a magic."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_ipython().run_line_magic":
            words = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            if words and words[0] in ("pinfo", "pinfo2"):
                yield from words[1:]


class _Loops:
    """Begins the loops of a cell, by line: over a list, tuple or range by an iterator that tells its place.

    ``first``: the index of the item at which a loop begins the first time.
    """

    def __init__(self, first: dict[int, int]) -> None:
        self._first = first
        self._begun: dict[int, tuple[Sequence[Any], Any]] = {}

    def __call__(self, line: int, items: Any) -> Any:
        first = self._first.pop(line, 0)
        self._begun.pop(line, None)
        if getattr(type(items), "__iter__", None) not in _COUNTED:
            return items
        iterator = iter(items)
        if first:
            iterator.__setstate__(first)
        self._begun[line] = items, iterator
        return iterator

    def index(self, line: int) -> int:
        """The index of the present item of the loop; -1 where it cannot be told."""
        items, iterator = self._begun.get(line, ((), iter(())))
        return len(items) - length_hint(iterator) - 1


def _loops(node: ast.AST) -> Iterator[ast.For]:
    """The loops within a statement, outer ones first; not those of functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    if isinstance(node, ast.For):
        yield node
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _loops(inner)


def _behind(statement: ast.stmt, text: str) -> bytes:
    """The text after a statement on its last line."""
    assert statement.end_lineno is not None
    return text.split("\n")[statement.end_lineno - 1].encode()[statement.end_col_offset :].lstrip()


def _begins(statement: ast.stmt) -> int:
    """The first line of a statement, with its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _wait_for(coroutine: Any) -> Any:
    """The result of a cell's coroutine, in a loop of its own, because the engine's loop is busy running the cell.

    An interrupt, or what else leaves the loop before, cancels the coroutine and waits for its end.
    """
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
    engines = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    task = _loop.create_task(coroutine)
    try:
        try:
            return _loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                _cancel(task, coroutine, _loop)
            raise
    finally:
        asyncio._set_running_loop(engines)


def _cancel(task: asyncio.Task[Any], coroutine: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Cancel a cell's task and wait for its end; else give up the loop, which would continue it in the next cell."""
    global _loop
    task.cancel()
    try:
        loop.run_until_complete(asyncio.wait([task], timeout=_SECONDS_TO_END))
    finally:
        if not task.done():
            loop.close()
            _loop = None
            with suppress(Exception):  # of the cell's own code
                coroutine.close()
            text = "The cell has not ended when its `await` was cancelled: it will not continue, nor do tasks of cells."
            print(text, file=sys.stderr)  # noqa: T201
        elif not task.cancelled():
            task.exception()  # otherwise asyncio reports it later, as one that nobody has seen
