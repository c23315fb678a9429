"""Commands of a magic's line: functions, whose docstrings and parameters are their help, parsing and completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import getdoc
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from ring_notebook.text.line_options import Option, options_of

__all__ = ["Command", "Option", "command"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
_COLUMN = 26  # where the explanations begin
_FILE = "ring_"  # how the file of a command of `%ring` begins


class _HelpShownError(Exception):
    """The line asked for help; it has been printed."""


class Command(Generic[P, R]):
    """A command, called ``prog`` with the words before it; calling it calls its ``action``.

    The first sentence of the action's docstring is its help. Its options are those of the action's parameters and of
    the fields of ``records``. Help and docs have a heading for each ``group``. ``replaces`` maps former commands
    to what to type now.
    """

    def __init__(
        self,
        prog: str,
        action: Callable[P, R],
        group: str = "",
        records: Sequence[type] = (),
        replaces: Mapping[str, str] | None = None,
    ) -> None:
        self.prog = prog
        self.name = prog.split()[-1]
        self.action = action
        self.group = group
        self.replaces = dict(replaces or {})
        self.commands: dict[str, Command[..., Any]] = {}
        about = " ".join((getdoc(action) or "").split("\n\n")[0].split()).rstrip(".")
        self.about = f"{about[:1].lower()}{about[1:]}"
        self.all_options = options_of(action, *records)
        self.options = [one for one in self.all_options if one.help]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.action(*args, **kwargs)

    def command(self, action: Callable[Q, S]) -> Command[Q, S]:
        """Declare a command below this one, called after its function."""
        made = Command(f"{self.prog} {action.__name__}", action, self.group)
        self.commands[made.name] = made
        return made

    def every(self) -> Iterator[Command[..., Any]]:
        """This command and all below it."""
        yield self
        for one in self.commands.values():
            yield from one.every()

    def find(self, words: Sequence[str]) -> tuple[Command[..., Any], list[str]]:
        """The command that the first words name, and the words after it."""
        if words and words[0] in self.commands:
            return self.commands[words[0]].find(words[1:])
        return self, list(words)

    def renamed(self, words: Sequence[str]) -> tuple[list[str], str]:
        """The words with the present name of a former command, and a sentence about it, which is empty for others."""
        for before, now in [pair for one in self.every() for pair in one.replaces.items()]:
            old = before.split()
            if list(words[: len(old)]) == old:
                text = (
                    f"`{self.prog} {before}` is `{self.prog} {now}` now; the next release does not know the old name."
                )
                return [*now.split(), *words[len(old) :]], text
        return list(words), ""

    def parse(self, words: Sequence[str]) -> dict[str, Any] | None:
        """The values of the options by parameter; None when help was asked for, and printed. Raises UsageError."""
        try:
            return vars(_Parser(self).parse_args(list(words)))
        except _HelpShownError:
            return None
        except UsageError as error:
            raise UsageError(f"{error}{self._meant(words)}") from None

    def _meant(self, words: Sequence[str]) -> str:
        """A hint for a wrong word: the most similar one, or all commands; empty if neither helps."""
        known = [*self.commands, *(name for one in self.options for name in (*one.flags, *one.choices))]
        for word in words:
            name = word.partition("=")[0]
            if name not in known and (like := get_close_matches(name, known, 1)):
                return f"; did you mean {like[0]}?"
            if name.isdecimal() and "-n" in known and not any(one[:1] == "-" for one in words):  # a value of an option
                return f"; did you mean -n {name}?"
        if self.commands and words and words[0][:1] not in "-0123456789":
            return f"; {self.prog} knows {', '.join(self.commands)}"
        return ""

    @property
    def usage(self) -> str:
        """The command with its arguments."""
        return " ".join([self.prog, *(one.usage for one in self.options if not one.flags)])

    def help(self) -> str:
        """What the command does, and a line for each option and each command below it."""
        return "\n".join([f"{self.usage}: {self.about}.", *self._rows("  "), ""])

    def _rows(self, indent: str) -> list[str]:
        lines = [_row(f"{indent}{one.shown}", one.help) for one in self.options]
        group = self.group
        for name, one in self.commands.items():
            if one.group != group:
                group = one.group
                lines += ["", f"{group.capitalize()}:"]
            lines += [_row(f"{indent}{name}", one.about), *one._rows(f"{indent}    ")]
        return lines

    def complete(self, given: Sequence[str], begun: str, session: Any) -> tuple[list[str], bool]:
        """Completions of ``begun`` after the words ``given``, and whether nothing else can follow."""
        before = next((one for one in self.options if one.value and given and given[-1] in one.flags), None)
        place = before or self._argument(given)
        found = [*self.commands] if not given else []
        found += [max(one.flags, key=len) for one in self.options if one.flags]
        if before is not None:
            found = []
        if place is not None and not begun.startswith("-"):
            found += [*place.choices, *(place.complete(session, begun) if place.complete else ())]
        own = place is not None and place.complete is not None
        return [name for name in dict.fromkeys(found) if name.startswith(begun) and name not in given], own

    def _argument(self, given: Sequence[str]) -> Option | None:
        """The argument that follows the words ``given``."""
        valued = {flag for one in self.options if one.value for flag in one.flags}
        pairs = zip(["", *given], given, strict=False)
        before = sum(not word.startswith("-") and last not in valued for last, word in pairs)
        arguments = [one for one in self.options if not one.flags]
        last = arguments[-1:] if arguments and arguments[-1].many else []
        return next(iter([*arguments[before:], *last]), None)


class _Parser(MagicArgumentParser):
    """The parser of a command's options."""

    def __init__(self, command: Command[..., Any]) -> None:
        self._command = command
        super().__init__(prog=command.prog, add_help=True)  # type: ignore[no-untyped-call]
        exclusive = self.add_mutually_exclusive_group()
        for one in command.all_options:
            one.add_to(exclusive if one.exclusive else self)

    def exit(self, _status: int = 0, _message: str | None = None) -> NoReturn:
        """End the parsing, after help was printed."""
        raise _HelpShownError

    def format_help(self) -> str:
        return self._command.help()


def command(
    group: str, *records: type, replaces: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Command[P, R]]:
    """Declare the command of a file, ``ring_NAME.py`` for ``%ring NAME`` and ``ringNAME.py`` for ``%%ringNAME``."""

    def declare(action: Callable[P, R]) -> Command[P, R]:
        file = action.__module__.rpartition(".")[2]
        prog = f"%ring {file.removeprefix(_FILE)}" if file.startswith(_FILE) else f"%%{file}"
        return Command(prog, action, group, records, replaces)

    return declare


def _row(left: str, right: str) -> str:
    return f"{left:<{_COLUMN}} {right}"
