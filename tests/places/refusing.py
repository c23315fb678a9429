"""Runs a command whose system calls of some names are refused: ``refusing.py ERRNO CALL,CALL... COMMAND...``.

ENOSYS (38) is what kernels answer that lack a call, and gVisor; EPERM (1) what seccomp profiles of containers do. The
filter reaches all that the command starts. It is a program of its own, for any Python, and imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# By name: the numbers of x86-64, and of aarch64 and the later machines.
NUMBERS = {
    "clone3": (435, 435),
    "close_range": (436, 436),
    "epoll_create1": (291, 20),
    "eventfd2": (290, 19),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "flock": (73, 32),
    "getrlimit": (97, 163),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mknodat": (259, 33),
    "openat2": (437, 437),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prctl": (157, 167),
    "preadv2": (327, 286),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "rseq": (334, 293),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sendmsg": (46, 211),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "unshare": (272, 97),
}


def refuse(error: int, names: list[str]) -> None:
    """Have this process, and all that it starts, get ``error`` from these calls."""
    rules = [(0x20, 0, 0, 0)]  # load the number of the call
    for name in names:
        number = NUMBERS[name][os.uname().machine != "x86_64"]
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
    rules.append((0x06, 0, 0, 0x7FFF0000))  # allow
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    # PR_SET_NO_NEW_PRIVS, and PR_SET_SECCOMP with SECCOMP_MODE_FILTER
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


if __name__ == "__main__":
    refuse(int(sys.argv[1]), [name for name in sys.argv[2].split(",") if name])
    os.execvp(sys.argv[3], sys.argv[3:])
