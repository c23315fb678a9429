"""Notebooks on a login node whose engines run in a batch job: ``notebook_on_login.py SCENARIO FOLDER``.

Each scenario prints what the notebook says, one line a step.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.numpy_framework import numpy_framework
from notebook.kernel import ANSI, Notebook

FOLDER = Path(sys.argv[2])
WHERE = "import socket, torch\nprint(float(ring.allreduce(torch.ones(1), op=ring.Sum)), socket.gethostname())"
TRAIN = """
import time
import torch
model = torch.nn.Linear(2, 1)
ring.log(loss=1.0)
saved = ring.checkpoint(model, every="1 h")
while saved.steps < 10_000:
    time.sleep(0.05)
    saved.step()
"""
SET_UP = "%%ringtrain --setup\nnumber = 7"
JOB = "--batch slurm -N 2 -n 4 --time 0:10:00"


def tell(what: str, text: object) -> None:
    print(f"{what}: {text}", flush=True)  # noqa: T201


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def jobs() -> list[str]:
    return slurm("squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%i").split()


def block() -> str:
    """A job that has all hosts; its number."""
    return slurm("sbatch", "--parsable", "--nodes=2", "--ntasks=4", "--wrap=sleep 600", "--output=/dev/null")


def status(notebook: Notebook, *, until: str, seconds: float = 240) -> str:
    """What `%ring status` says, a table or an error, when ``until`` is in it."""
    deadline = time.monotonic() + seconds
    while True:
        outputs = notebook.run("%ring status")
        said = "".join(
            "\n".join(one["traceback"]) if "traceback" in one else one.get("text") or one["data"]["text/plain"]
            for one in outputs
        )
        if re.search(until, ANSI.sub("", said)):
            return ANSI.sub("", said)
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def opened(start: str = "") -> Notebook:
    notebook = Notebook(FOLDER)
    tell("loaded", notebook.text("%load_ext ring_notebook"))
    if start:
        notebook.text(f"%ring start {start}")
    return notebook


def first_cell() -> None:
    """The job waits for another one, and a cell for the job."""
    other = block()
    notebook = opened()
    tell("here", notebook.error("%ring start -n 2")[1])
    notebook.text(f"%ring start {JOB}")
    notebook.text(f"%%ringtrain --out queued\n{WHERE}")
    notebook.text("cell = queued")
    tell("waits", status(notebook, until="waits: (no hosts|jobs)"))
    tell("queue", notebook.text("%ring queue"))
    slurm("scancel", other)
    began = float(notebook.text("run = cell.wait()\nprint(run.log.started)\n").split()[-1])
    tell("printed", notebook.text("print(*(one.text for one in run.log.view().output))"))
    os.environ["SLURM_TIME_FORMAT"] = "%s"
    tell("seconds to the first cell", began - float(slurm("squeue", "-h", "-o", "%S").split()[-1]))
    tell("status", status(notebook, until="time limit"))
    tell("stopped", notebook.text("%ring stop"))
    tell("jobs", jobs())
    notebook.close()


def refused() -> None:
    for options in ([], ["--here"]):
        command = [str(Path(sys.executable).with_name("ringrun")), *options, "-np", "1", "echo", "ran"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        tell("ringrun", (done.returncode, done.stdout, done.stderr))
    notebook = opened()
    tell("queue", notebook.error(f"%ring start {JOB} --queue none")[1])
    notebook.text("%ring start --batch slurm -N 2 --time 9:00:00")
    tell("long", status(notebook, until="PartitionTimeLimit"))
    tell("stopped", notebook.text("%ring stop"))
    half = slurm("sbatch", "--parsable", "--nodes=1", "--ntasks=2", "--wrap=sleep 600", "--output=/dev/null")
    while slurm("squeue", "--noheader", "--format=%T", "--jobs", half) != "RUNNING":
        time.sleep(0.1)
    notebook.text(f"%ring start {JOB}")
    tell("sooner", status(notebook, until="waits: no hosts"))
    tell("stopped", notebook.text("%ring stop"))
    slurm("scancel", half)
    other = block()
    notebook.text(f"%ring start {JOB}")
    (own,) = set(jobs()) - {other}
    slurm("scontrol", "hold", own)
    tell("held", status(notebook, until="is held"))
    notebook.text("%%ringtrain --out queued\n1")
    slurm("scancel", own)
    tell("cancelled", status(notebook, until="scancel"))
    tell("cell", notebook.error("queued.wait()")[1])
    slurm("scancel", other)
    notebook.close()


def cancelled() -> None:
    notebook = opened(JOB)
    status(notebook, until=r"4 engines \(")
    notebook.text(f"{SET_UP}\nprint('begun')")
    notebook.text("%%ringtrain --background --out run\nimport time\ntime.sleep(600)")
    slurm("scancel", *jobs())
    tell("cell", notebook.error("run.wait()")[1])
    tell("status", status(notebook, until="scancel"))
    tell("jobs", jobs())
    notebook.close()


def kept() -> None:
    """By a kernel that ends while its job waits, then by one that ends while it runs."""
    other = block()
    notebook = opened(f"{JOB} --keep")
    notebook.close()
    notebook = opened("")
    tell("attached", notebook.text("%ring attach"))
    slurm("scancel", other)
    status(notebook, until=r"4 engines \(")
    notebook.text("%%ringtrain\nx = 7 + ring.rank()")
    notebook.close()
    notebook = opened("")
    tell("attached", notebook.text("%ring attach"))
    tell("pulled", notebook.text("%ring pull x -t 3\nprint(x)"))
    tell("stopped", notebook.text("%ring stop"))
    tell("jobs", jobs())
    notebook.close()


def out_of_time() -> None:
    notebook = opened("--batch slurm -N 2 -n 4 --time 0:03:00 --signal 60s")  # less than a cell may take
    status(notebook, until=r"4 engines \(")
    notebook.text(f"%%ringtrain --background --out run\n{TRAIN}")
    tell("cell", notebook.error("run.wait()")[1])
    tell("checkpoints", notebook.text("print(*(run.log.directory / 'checkpoints').glob('step*'))"))
    tell("status", status(notebook, until="time limit;"))
    tell("snapshots", notebook.text("%ring snapshots"))
    notebook.close()


def host_lost() -> None:
    """The test takes ring-b away when it reads "ready"."""
    notebook = opened(JOB)
    status(notebook, until=r"4 engines \(")
    notebook.text("%%ringtrain --background --out run\nimport time\ntime.sleep(600)")
    tell("ready", "")
    tell("cell", notebook.error("run.wait()")[1])
    tell("stopped", notebook.text("%ring stop"))
    notebook.close()


def requeued() -> None:
    notebook = opened(f"{JOB} --requeue")
    status(notebook, until=r"4 engines \(")
    notebook.text(SET_UP)
    notebook.text(f"%%ringtrain --background --name it --out run\nassert number == 7\n{TRAIN}")
    notebook.text("import time\nwhile not run.log.view().ranks: time.sleep(0.1)")
    notebook.text("get_ipython().magics_manager.registry['RingMagics']._session.cluster.write_checkpoint()")
    (job,) = jobs()
    notebook.text("while not list((run.log.directory / 'checkpoints').glob('step*')): time.sleep(0.1)")
    slurm("scontrol", "requeue", job)
    tell("waits", status(notebook, until="waits"))
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    tell("again", status(notebook, until="in run"))
    tell("jobs", jobs() == [job])
    resumed = "session = get_ipython().magics_manager.registry['RingMagics']._session\n"
    resumed += "while 'Resumed' not in str(session.run.log.view().output): time.sleep(0.1)\nprint('resumed')"
    tell("run", notebook.text(resumed))
    tell("interrupted", notebook.text("%ring stop --runs"))
    tell("stopped", notebook.text("%ring stop"))
    notebook.close()


def idle() -> None:
    notebook = opened(f"{JOB} --idle 2s")
    notebook.text("%%ringtrain --out queued\nvalue = 5 + ring.rank()")
    tell("released", status(notebook, until="Released"))
    wait_for_no_jobs()
    tell("snapshots", notebook.text("%ring snapshots"))
    notebook.text(f"%ring start {JOB}")
    status(notebook, until=r"4 engines \(")
    tell("restored", notebook.text("%ring snapshots restore idle"))
    notebook.text("%%ringtrain\nassert value == 5 + ring.rank()")
    tell("stopped", notebook.text("%ring stop"))
    wait_for_no_jobs()
    notebook.close()


def submitted() -> None:
    """A cell that has run on the login node runs again in a job, and is exported for one."""
    notebook = opened("-n 2 --here")
    notebook.text(SET_UP)
    notebook.text("import os\nos.environ['HF_TOKEN'] = 'a token of the kernel'")
    notebook.text(f"%%ringtrain --name far\n{WHERE}\nring.log(loss=number)\nimport os\nprint(os.getenv('HF_TOKEN'))")
    tell("submitted", notebook.text("%ring submit slurm far -N 2 -n 4 --time 0:05:00"))
    wait_for_no_jobs()
    tell("runs", notebook.text("%ring runs --all"))
    tell(
        "printed",
        notebook.text(
            "from ring_notebook.notebook.run.catalogue import find\n"
            "print(*(one.text for one in find('far').view().output))"
        ),
    )
    tell("exported", notebook.text("%ring export far.py far --job slurm -N 2 --time 0:05:00"))
    notebook.close()
    slurm("sbatch", f"--chdir={FOLDER}", f"{FOLDER}/far.sh")
    wait_for_no_jobs()
    tell("script", (FOLDER / "far.out").read_text())


def script() -> None:
    notebook = opened()
    tell("script", notebook.text(f"%ring start {JOB} --dry-run"))
    tell("jobs", jobs())
    notebook.close()


def wait_for_no_jobs() -> None:
    deadline = time.monotonic() + 200
    while jobs():
        assert time.monotonic() < deadline, jobs()
        time.sleep(0.2)


def recorded() -> None:
    """Somebody records the network; tells what must not be in that, and waits until it was said again."""
    notebook = opened(JOB)
    status(notebook, until=r"4 engines \(")
    notebook.text("%%ringtrain\nvariable = 'secret'")
    where = "get_ipython().magics_manager.registry['RingMagics']._session.cluster.directory"
    (client,) = Path(notebook.text(f"print({where})").strip()).glob("security/*-client.json")
    keys = json.loads(client.read_text())
    of_rank = "from ring_notebook.core import world\nkey = world.prepare_host().rendezvous.key.hex()"
    notebook.text(f"%%ringtrain\nimport os\n{of_rank}\ntoken = os.environ['HF_TOKEN']")
    for secret in (keys["key"], keys["curve_serverkey"], notebook.text("%ring pull key -t 0\nprint(key)").split()[-1]):
        tell("secret", secret)
    tell("ready", notebook.text("import os\n%ring pull token -t 3\nprint(token == os.environ['HF_TOKEN'])"))
    while not (FOLDER / "go on").exists():
        time.sleep(0.1)
    cell = "ranks = sorted(ring.allgather_object(ring.rank()))\nsaid = (ranks, variable, 'stranger' in globals())"
    notebook.text(f"%%ringtrain\n{cell}")
    tell("after", notebook.text("%ring pull said -t 3\nprint(*said)"))
    tell("stopped", notebook.text("%ring stop"))
    wait_for_no_jobs()
    notebook.close()


def killed() -> None:
    """Kernels, some at a time, that are killed while they submit a job, while it waits, and while its engines start."""
    with numpy_framework(FOLDER), ThreadPoolExecutor(4) as pool:
        list(pool.map(kill_one, range(int(sys.argv[3]))))
    wait_for_no_jobs()


def kill_one(number: int) -> None:
    job = "--batch slurm -N 1 -n 1 --time 0:10:00"
    notebook = opened()
    if number % 4:
        notebook.client.kc.execute(f"%ring start {job}")
        time.sleep(0.04 * (number % 16))
    else:
        notebook.text(f"%ring start {job}")
        status(notebook, until=r"runs|1 engine \(" if number % 8 else r"1 engine \(")
    os.kill(notebook.pid, signal.SIGKILL)
    notebook.close()


globals()[sys.argv[1]]()
