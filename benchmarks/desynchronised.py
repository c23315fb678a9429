"""Ten ways to desynchronise three ranks, and who names the rank that parted and what it did.

Ours is the sentence of ``ringrun --trace-on-error``. Beside it PyTorch's Flight Recorder: the same program on Gloo,
where each rank that lives dumps its recorder when its collective fails or has waited for 4 s, and ``torchfrtrace``
reads the dumps. An answer counts where it names the rank, and more where it also says what that rank did.

    .venv/bin/python benchmarks/desynchronised.py
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

RANKS, STEPS, PARTS, WHO = 3, 20, 12, 1
BIN = Path(sys.executable).parent
LIMIT = 60.0  # seconds for a job
TIMEOUT = 5.0  # seconds for a collective on Gloo, and until a rank of Gloo dumps

CASES = {
    "raises": ("raise", r"raised ValueError"),
    "returns early": ("return", r"ended|called nothing"),
    "is killed": ("kill", r"SIGKILL"),
    "exits": ("exit", r"ended|exit code 3"),
    "stops computing": ("sleep", r"called nothing|is in|computes|never came"),
    "has another shape": ("shape", r"\b7\b|shape|elements|\[7\]"),
    "has another dtype": ("dtype", r"float64|Double"),
    "calls another collective": ("other", r"broadcast"),
    "leaves one out": ("skip", r"broadcast"),
    "has another root": ("root", r"root|from rank"),
}
"""What rank 1 does at step 12 by name: the argument of the program, and a pattern for what an answer must say of it."""


def train(case: str) -> None:
    """The program of a rank: an allreduce, a broadcast and a barrier a step."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    for step in range(STEPS):
        here = case if rank == WHO and step == PARTS else ""
        if here == "raise":
            raise ValueError("a bad sample")
        if here == "return":
            return
        if here == "exit":
            os._exit(3)
        if here == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if here == "sleep":
            time.sleep(LIMIT)
        gradient = torch.ones(7 if here == "shape" else 8, dtype=torch.float64 if here == "dtype" else torch.float32)
        if here == "other":
            dist.broadcast(gradient, 0)
        elif here != "skip":
            dist.all_reduce(gradient)
        dist.broadcast(gradient, 2 if here == "root" else 0)
        dist.barrier()


def rank_of_job(backend: str, case: str, folder: str) -> None:
    """What a process of a job runs."""
    import torch.distributed as dist

    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT))
    if backend == "ring":
        train(case)
        return
    from torch._C._distributed_c10d import _dump_fr_trace

    place = Path(folder, f"rank_{dist.get_rank()}")

    def dump() -> None:
        content = pickle.loads(_dump_fr_trace(True, True, False))
        # As NCCL's recorder has it: from Gloo's own dumps torchfrtrace ends with KeyError: ('0', 2).
        content["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}}
        for entry in content["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
        place.write_bytes(pickle.dumps(content))

    timer = threading.Timer(TIMEOUT - 1, dump)
    timer.daemon = True
    timer.start()
    try:
        train(case)
    finally:
        dump()
        time.sleep(TIMEOUT)  # torchrun would end the others before they have dumped


def ours(case: str, folder: Path) -> str:
    """The sentence of a job of ours that says where ranks part."""
    program = [str(BIN / "ringrun"), "-np", str(RANKS), "--trace-on-error", str(folder / "trace.json")]
    environment = {**os.environ, "RING_STALL_WARNING": "2"}
    job = subprocess.run(
        [*program, sys.executable, __file__, "ring", case, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * LIMIT,
        env=environment,
    )
    said = re.search(r"^(.*)\. \S*trace\.json has the last operations", job.stderr, re.MULTILINE)
    return said[1].removeprefix("ringrun: ") if said else ""


def flight_recorder(case: str, folder: Path) -> str:
    """What `torchfrtrace` says of the dumps of a job on Gloo."""
    program = [str(BIN / "torchrun"), "--nproc-per-node", str(RANKS), "--monitor-interval", "15"]
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_SYMBOLIZE": "1"}
    with open(folder / "torchrun.txt", "wb") as log:
        job = subprocess.Popen(
            [*program, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", __file__, "gloo", case, str(folder)],
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            job.wait(LIMIT / 2)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGINT)
            job.wait(LIMIT)
    read = [str(BIN / "torchfrtrace"), str(folder), "-p", "rank_", "--allow-incomplete-ranks"]
    (folder / "torchrun.txt").unlink()
    done = subprocess.run(read, capture_output=True, text=True, check=False, timeout=LIMIT)
    return "\n".join(line for line in (done.stdout + done.stderr).splitlines() if "tabulate" not in line)


def judged(said: str, pattern: str) -> str:
    """Whether an answer names the rank, and says what it did."""
    culprits = re.search(rf"\brank {WHO}\b|(missing|culprit) ranks?: \{{?\[?{WHO}\b[^,]", said, re.IGNORECASE)
    if not culprits:
        return "no"
    return "rank and cause" if re.search(pattern, said) else "rank"


def main() -> None:
    """Print the table, and below it what both have said."""
    rows, texts = [], []
    for name, (case, pattern) in CASES.items():
        answers = []
        for ask in (ours, flight_recorder):
            with tempfile.TemporaryDirectory() as outer:
                folder = Path(outer, "dumps")
                folder.mkdir()
                answers.append(ask(case, folder))
        rows.append(f"| {name} | {judged(answers[0], pattern)} | {judged(answers[1], pattern)} |")
        texts.append(f"{name}\n  ours: {answers[0]}\n  Flight Recorder: {' / '.join(answers[1].splitlines())}")
        print(texts[-1], flush=True)
    print("\n| rank 1 | ours | Flight Recorder |\n|---|---|---|")
    print(*rows, sep="\n")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        rank_of_job(*sys.argv[1:])
    else:
        main()
