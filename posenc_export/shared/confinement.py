"""Limits of the running process, for one that reads a stranger's file.

Sources: getrlimit(2); landlock(7) and linux/landlock.h for numbers of calls and rights.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

CREATE, RESTRICT = 444, 446  # system calls of Landlock, the same on every processor
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
READ = 0b1100  # rights to read files and folders, which stay
# Number of rights of files, of TCP, and of other processes, that each version of Landlock knows.
RIGHTS = {1: (13, 0, 0), 2: (14, 0, 0), 3: (15, 0, 0), 4: (15, 2, 0), 5: (16, 2, 0), 6: (16, 2, 2)}
MEMORY = 3, 4  # the part of the machine's memory that a process may use


def confine(seconds: float) -> None:
    """Limit the memory and the processor time of this process. On Linux it then also writes no
    file, starts no program, connects to nothing by TCP, sends no signals, and ends with its parent.
    A kernel without Landlock (before 5.13) limits only what is written, to empty files.

    Args:
        seconds: of wall-clock time that the process may use; each processor may use as many.
    """
    cores = os.cpu_count() or 1
    limits = {resource.RLIMIT_CPU: int(seconds) * cores + 1, resource.RLIMIT_CORE: 0}
    limits[resource.RLIMIT_FSIZE] = 0
    if sys.platform == "linux":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limits[resource.RLIMIT_DATA] = pages * MEMORY[0] // MEMORY[1]
        Path("/proc/self/oom_score_adj").write_text("1000")  # ended first if memory runs out
    for kind, most in limits.items():
        highest = resource.getrlimit(kind)[1]
        value = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(kind, (value, value))
    if sys.platform == "linux":
        library: Any = ctypes.CDLL(None, use_errno=True)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _without_writing(library)


def _without_writing(library: Any) -> None:
    """Take the rights away that a kernel knows, but those to read files."""
    version = library.syscall(CREATE, None, 0, 1)
    if version < 1:  # a kernel without Landlock
        return
    files, network, others = ((1 << count) - 1 for count in RIGHTS[min(version, max(RIGHTS))])
    size = 8 * (1 + (version > 3) + (version > 5))
    rules = struct.pack("=3Q", files & ~READ, network, others)[:size]
    number = library.syscall(CREATE, rules, len(rules), 0)
    if number < 0 or library.syscall(RESTRICT, number, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    os.close(number)
