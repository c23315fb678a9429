"""What somebody reads who records the network of a job in a real Slurm: nothing that is secret. `make test-slurm`."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from harness.programs import executable
from harness.slurm import LOGIN, Slurm, missing
from harness.sniffer import Recording, recorded

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

HERE = Path(__file__).parent
RINGRUN = [str(Path(sys.executable).with_name("ringrun")), "-np", "4"]
SLURM = ("slurm", "srun")
"""Programs that listen too: what was said to srun 22.05 ends it when it is said again."""
TOKEN = "hf_a-token-in-the-environment"
RANK = """
import os
from ring_notebook.api.basics import init, rank, size
from ring_notebook.core import world
init()
key = world.prepare_host().rendezvous.key.hex()
print(f"rank {rank()} of {size()} has {os.environ['HF_TOKEN']}, keys {key}")
"""


def spaces(system: Slurm) -> list[str]:
    return [f"{system.hosts.prefix}-{place}" for place in "abl"]


def assert_hidden(wire: Recording, secrets: list[str]) -> None:
    """Nothing of it can be read, in whatever way a program may have written it."""
    assert wire.holding(b"ring_notebook.launch.remote.agent"), "srun's own message, which shows that this records"
    for secret in secrets:
        assert len(secret) >= 16, secret
        for form in (secret.encode(), secret.replace("-", "").encode(), repr(secret).encode()):
            assert wire.holding(form) == [], f"{secret} crosses the network"
        if re.fullmatch("[0-9a-f]{64,}", secret):
            assert wire.holding(bytes.fromhex(secret)) == []


@pytest.mark.parametrize("proof", ["munge", "files"])
def test_ringrun(system: Slurm, proof: str, tmp_path: Path) -> None:
    """With munge the hosts prove who they are by that, without by files in the home folder."""
    program = [*RINGRUN, sys.executable, "-c", RANK]
    hidden = executable(tmp_path / "unmunge", "#!/bin/sh\nexit 1\n")
    path = [f"PATH={tmp_path}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"] if proof == "files" else []
    (tmp_path / "munge").symlink_to(hidden)
    command = ["env", f"HF_TOKEN={TOKEN}", f"HOME={tmp_path}", *path]
    with recorded(spaces(system)) as wire:
        code, said = system.run([*command, *system.python(program=program)])
    assert code == 0, said
    found = re.findall(r"rank \d of 4 has (\S+), keys ([0-9a-f]{64,})", said)
    assert {token for token, _ in found} == {TOKEN}, said
    assert len(found) == 4, said
    assert_hidden(wire, [TOKEN, *{key for _, key in found}])
    folder = tmp_path / ".config" / "ring_notebook" / "certificates"
    assert folder.exists() == (proof == "files")
    assert list(folder.glob("*")) == [], "what has proven who is who is removed"


def test_a_host_that_nothing_proves_gets_nothing(system: Slurm, tmp_path: Path) -> None:
    """An agent whose munge answers, and a supervisor without one: no job, and a sentence that says what to do."""
    for name in ("munge", "unmunge"):
        executable(tmp_path / name, "#!/bin/sh\n[ $(hostname) = ring-a ] || exit 1\nexec /usr/bin/" + name + ' "$@"\n')
    path = f"PATH={tmp_path}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    program = ["env", path, *RINGRUN, sys.executable, "-c", RANK]
    with recorded(spaces(system)) as wire:
        code, said = system.run(["env", f"HF_TOKEN={TOKEN}", *system.python(program=program)])
    assert code == 1, said
    assert "rank 2 on ring-b failed first: its host cannot be used: nothing proves who is at the other end: " in said
    assert "Start munge on all hosts" in said
    assert_hidden(wire, [TOKEN])


def test_a_notebook_on_a_login_node(system: Slurm, tmp_path: Path) -> None:
    """Its environment, the controller's keys, the ranks' key; and to say again what was recorded changes nothing."""
    program = [sys.executable, str(HERE / "notebook_on_login.py"), "recorded", str(tmp_path)]
    command = ["env", f"PYTHONPATH={HERE.parent}", f"HF_TOKEN={TOKEN}", *program]
    said = ""
    with contextlib.ExitStack() as stack:
        with recorded(spaces(system)) as wire:
            notebook = stack.enter_context(system.start(command, LOGIN))
            stack.callback(notebook.kill)
            assert notebook.stdout is not None
            while "\nready" not in said:
                line = notebook.stdout.readline()
                assert line, said
                said += line
        secrets = [TOKEN, *re.findall("^secret: (.*)$", said, re.MULTILINE)]
        assert len(secrets) >= 4, said
        assert_hidden(wire, secrets)
        answers = [wire.replayed(space, f"{system.hosts.prefix}-b", SLURM) for space in spaces(system)]
        assert sum(answer.connections for answer in answers) > 100
        for answer in answers:
            assert not [one for one in secrets if one.encode() in answer.heard]
        (tmp_path / "go on").touch()
        said = notebook.stdout.read()
        assert notebook.wait(60) == 0, said
    assert "after: [0, 1, 2, 3] secret" in said, said


def test_the_doctor(system: Slurm) -> None:
    program = [RINGRUN[0], "--doctor"]
    with recorded(spaces(system)) as wire:
        code, said = system.run(["env", f"HF_TOKEN={TOKEN}", *system.python(program=program)])
    assert code == 0, said
    assert not wire.holding(TOKEN.encode())
    assert wire.holding(b"ring_notebook.launch.doctor")
