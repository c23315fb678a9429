"""Why a program cannot be started on a rank, in words, with the exit codes that shells use."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shlex
import shutil
from collections.abc import Sequence

from ring_notebook.machine.os_calls import resource_limits

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class NoProgramError(OSError):
    """A rank cannot be started for a reason that lies in its program, not in this host."""


def explain_start(
    command: Sequence[str], path: str | None = None, error: OSError | None = None
) -> tuple[int, str] | None:
    """The exit code and the reason why ``command`` cannot be started on this host; None when nothing speaks against it.

    Programs are looked up in ``path`` (default: PATH). ``error`` is the error of a failed start; with it there always
    is a reason.
    """
    program = command[0]
    if shutil.which(program, path=path) is None:
        if not os.path.exists(program):
            return _NOT_FOUND, f"there is no program {program!r}"
        if os.path.isdir(program):
            return _NOT_EXECUTABLE, f"{program} is a directory"
        if not os.access(program, os.X_OK):
            return _NOT_EXECUTABLE, f"{program} is not executable{_no_programs_there(program)}"
        return _NOT_FOUND, f"there is no program {program!r} on the PATH; did you mean: ./{program}"
    if error is None:
        return None
    hint = f"; did you mean: python {shlex.join(command)}" if program.endswith(".py") else ""
    if error.errno == errno.ENOENT:
        return _NOT_EXECUTABLE, f"the first line of {program} names an interpreter that does not exist{hint}"
    if error.errno == errno.ENOEXEC:
        return _NOT_EXECUTABLE, f"{program} cannot be started: {_not_a_program(shutil.which(program, path=path))}{hint}"
    return _NOT_EXECUTABLE, f"{program} cannot be started: {error.strerror}{hint}"


def _no_programs_there(file: str) -> str:
    """What to do where it is the disk that allows no program, whatever the mode of the file."""
    if os.stat(file).st_mode & 0o111 and os.statvfs(file).f_flag & os.ST_NOEXEC:
        return ": its disk is mounted with noexec; move it to another, or start its interpreter, as in `sh FILE`"
    return ""


def _not_a_program(file: str | None) -> str:
    with contextlib.suppress(OSError), open(file or "", "rb") as opened:
        if opened.read(4) == b"\x7fELF":
            return "it was built for another processor or system"
    return "its first line names no interpreter, such as #!/bin/sh"


def explain_start_error(program: Sequence[str], error: OSError) -> tuple[int, str]:
    """The exit code and the reason why a start of a rank of ``program`` has failed."""
    code, reason = 1, f"this host cannot start the ranks: {error.strerror}"
    if isinstance(error, NoProgramError):
        code, reason = explain_start(program, error=error) or (code, reason)
    elif error.errno == errno.EMFILE:
        files, _ = resource_limits(resource.RLIMIT_NOFILE)
        reason += f"; this process may have {files}, raise it with `ulimit -n`"
    elif error.filename:
        reason += f": {error.filename}"
    return code, reason


def report_start_error(program: Sequence[str], error: OSError) -> int:
    """Write to stderr why a rank of ``program`` cannot be started, and return the exit code for it."""
    code, reason = explain_start_error(program, error)
    os.write(2, f"ringrun: {reason}\n".encode())
    return code
