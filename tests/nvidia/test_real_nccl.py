"""NVIDIA's own NCCL, as far as it works without a driver: the core opens it, and reads what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.programs import ran

# In a process of its own: all of them have one name, and a process has one of them.
PROGRAM = """
import ctypes, json, sys
from ring_notebook.core.native import core
path, driver = sys.argv[1:]
report = core.Devices(nccl_library=path, cuda_library=driver).report()
library = ctypes.CDLL(path)
library.ncclGetErrorString.restype = ctypes.c_char_p
names = [library.ncclGetErrorString(number).decode() for number in (0, 1, 7)]
one, handle = (ctypes.c_char * 128)(), ctypes.c_void_p()
got = library.ncclGetUniqueId(one)
print(json.dumps({"report": report, "names": names, "id": [got, any(one.raw)], "abort": library.ncclCommAbort(None)}))
"""


def test_the_core_opens_it(nccl: Path) -> None:
    (library,) = (nccl / "lib").glob("libnccl.so.2")
    command = [sys.executable, "-c", PROGRAM, str(library), "/nowhere/libcuda.so.1"]
    environment = {"NCCL_SOCKET_IFNAME": "lo", "PATH": "/usr/bin:/bin"}
    ended = ran(command, check=True, env=environment)
    said = json.loads(ended.stdout.splitlines()[-1])
    header = (nccl / "include" / "nccl.h").read_text()
    version = ".".join(
        header.split(f"#define NCCL_{part} ")[1].split("\n")[0].strip() for part in ("MAJOR", "MINOR", "PATCH")
    )
    assert said["report"]["nccl"] == version
    assert "nccl_error" not in said["report"]
    assert said["report"]["driver_error"].startswith("libcuda.so.1 cannot be loaded")
    assert said["names"][0] == "no error"
    assert "cuda error" in said["names"][1]
    assert "in progress" in said["names"][2]
    assert said["id"] == [0, True]
    assert said["abort"] == 0
