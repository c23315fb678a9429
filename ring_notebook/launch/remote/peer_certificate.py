"""How a supervisor and an agent learn each other's certificate over a stream that others may read or change.

Batch systems such as Slurm carry the streams of what they start in clear text. Each side therefore sends its
certificate, which is no secret, and what proves that a process of this user has made it:

- munge, with which Slurm itself tells users apart: a credential that holds the certificate, made for this user;
- where this host has no munge: a file with the certificate in a folder of this user's home, which both hosts share.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from ring_notebook.files.private_files import make_private_folder, open_own, open_private
from ring_notebook.rank.secure_streams import own_identity

Way = Literal["plain", "stream", "batch"]
"""How a stream to a host is protected: "plain": by its carrier, such as ssh; "stream": by TLS with certificates sent
over the stream; "batch": by TLS with certificates that this module proves."""
_SECONDS_TO_ANSWER = 20.0
_SECONDS_TO_APPEAR = 5.0
"""For a file of the other host in a shared home: NFS shows new files late."""
_UID = re.compile(r"^UID:.*\((\d+)\)$", re.MULTILINE)
_SOCKET = re.compile(r"^AuthInfo\s*=.*\bsocket=([^\s,]+)", re.MULTILINE)
_LONGEST = 1 << 12  # bytes of a certificate
_left: set[Path] = set()


class UnprovenPeerError(Exception):
    """Nothing proves who is at the other end of a stream."""


def own_certificate(way: Way) -> bytes:
    """The first message of this process, by which the other end knows it."""
    certificate = own_identity().certificate
    found = {"certificate": certificate}
    if way == "batch" and _munge_options() is not None:
        found["credential"] = _munge("munge", certificate).stdout
    elif way == "batch":
        try:
            path = _file_of(certificate)
            _left.add(path)
            make_private_folder(path.parent)
            _check_folder(path.parent)
            with open_private(path, "w") as file:
                file.write(certificate)
        except (OSError, RuntimeError) as error:  # the other end has to say it
            found["problem"] = f"{socket.gethostname()} has no munge, and no folder for its certificate: {error}"
    return json.dumps(found).encode()


def certificate_in(sent: bytes, way: Way) -> str:
    """The certificate that the other end has ``sent``.

    Raises UnprovenPeerError where nothing proves it, which says what to do.
    """
    found = json.loads(sent)
    certificate = str(found["certificate"])
    if way == "batch" and (problem := found.get("problem") or _problem(certificate, str(found.get("credential", "")))):
        raise UnprovenPeerError(
            f"nothing proves who is at the other end: {problem}. Start munge on all hosts, or share the home folder "
            "between them; RING_REMOTE_SHELL=ssh needs neither"
        )
    return certificate


def _problem(certificate: str, credential: str) -> str:
    if _munge_options() is not None:
        if not credential:
            return "the other host has no munge, and this one has"
        decoded = _munge("unmunge", credential)
        if decoded.returncode:
            return f"unmunge: {decoded.stderr.strip() or decoded.stdout.strip()}"
        about, _, payload = decoded.stdout.partition("\n\n")
        if (user := _UID.search(about)) is None or int(user[1]) != os.getuid():
            return "another user has made the credential"
        return "" if payload == certificate else "the credential is for another certificate"
    path, until = Path("~"), time.monotonic() + _SECONDS_TO_APPEAR
    while True:
        try:
            path = _file_of(certificate)
            _check_folder(path.parent)
            os.listdir(path.parent)  # NFS then asks its server what is new there
            with open_own(path) as file:
                same = file.read(_LONGEST) == certificate.encode()
        except FileNotFoundError as error:
            if time.monotonic() > until:
                return f"there is no munge here, and {path}: {error.strerror}"
            time.sleep(0.1)
        except (OSError, ValueError, RuntimeError) as error:
            return f"there is no munge here, and {path}: {getattr(error, 'strerror', None) or error}"
        else:
            return "" if same else f"{path} holds another certificate"


def forget() -> None:
    """Remove this process's certificate file; all other ends have read it."""
    while _left:
        with suppress(OSError):
            _left.pop().unlink()


def _file_of(certificate: str) -> Path:
    """Raises RuntimeError where this user has no home."""
    folder = Path.home() / ".config" / "ring_notebook" / "certificates"
    return folder / hashlib.sha256(certificate.encode()).hexdigest()


def _check_folder(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder}: expected a folder of this user that nobody else can enter; `chmod 700` it")


@cache
def _munge_options() -> list[str] | None:
    """The options with which munge answers here; None where it does not."""
    if _munge("munge", "", []).returncode == 0:
        return []
    # Slurm may use a munge of its own, even where the default is missing or another cluster's.
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "config"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False)
        if found := _SOCKET.search(shown.stdout):
            options = [f"--socket={found[1]}"]
            return options if _munge("munge", "", options).returncode == 0 else None
    return None


def _munge(program: str, text: str, options: Sequence[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [program, *((_munge_options() or []) if options is None else options)]
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
