"""Whether a process on this host has ended: its entry in the registry outlives the process."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def this_machine() -> str:
    """This boot and this namespace of process ids, in which one id means one process. "" if the system tells neither.

    A host name is not enough: containers may share it, and each of them numbers its own processes.
    """
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return ""


def is_gone(machine: str, pid: int) -> bool:
    """Whether this process has surely ended. False for a process of another machine, which may live."""
    if not machine or machine != this_machine():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user; or there is no such number
        return False
    with contextlib.suppress(OSError, IndexError):  # a zombie: it has ended, and its parent has not waited for it yet
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2][0] in "ZX"
    return False
