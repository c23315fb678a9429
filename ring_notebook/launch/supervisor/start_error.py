"""Why ranks cannot be started, in one line, and the exit code that shells use for it."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
from collections.abc import Sequence

__all__ = ["NoProgramError", "explain_start", "explain_start_error", "report_start_error"]

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class NoProgramError(OSError):
    """A rank cannot be started for a reason that lies in its program, not in this host."""


def explain_start(
    command: Sequence[str], path: str | None = None, error: OSError | None = None
) -> tuple[int, str] | None:
    """The exit code and the reason why ``command`` cannot be started on this host; None when nothing speaks against it.

    Programs are looked up in ``path`` (default: PATH). ``error`` is that of a start that has failed; then there always
    is a reason.
    """
    program = command[0]
    if shutil.which(program, path=path) is None:
        if not os.path.exists(program):
            return _NOT_FOUND, f"there is no program {program!r}"
        if os.path.isdir(program):
            return _NOT_EXECUTABLE, f"{program} is a directory"
        if not os.access(program, os.X_OK):
            return _NOT_EXECUTABLE, f"{program} is not executable"
        return _NOT_FOUND, f"there is no program {program!r} on the PATH; did you mean: ./{program}"
    if error is None:
        return None
    hint = f"; did you mean: python {shlex.join(command)}" if program.endswith(".py") else ""
    if error.errno == errno.ENOENT:
        return _NOT_EXECUTABLE, f"the first line of {program} names an interpreter that does not exist{hint}"
    return _NOT_EXECUTABLE, f"{program} cannot be started: {error.strerror}{hint}"


def explain_start_error(program: Sequence[str], error: OSError) -> tuple[int, str]:
    """The exit code and the reason why a start of a rank of ``program`` has failed."""
    code, reason = 1, f"this host cannot start the ranks: {error.strerror}"
    if isinstance(error, NoProgramError):
        code, reason = explain_start(program, error=error) or (code, reason)
    elif error.errno == errno.EMFILE:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason += f"; this process may have {files}, raise it with `ulimit -n`"
    elif error.filename:
        reason += f": {error.filename}"
    return code, reason


def report_start_error(program: Sequence[str], error: OSError) -> int:
    """Write to stderr why a rank of ``program`` cannot be started, and return the exit code for it."""
    code, reason = explain_start_error(program, error)
    os.write(2, f"ringrun: {reason}\n".encode())
    return code
