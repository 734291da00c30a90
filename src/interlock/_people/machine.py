"""Whether a process on this host is gone, for what it has said before: its entry in the registry outlives it."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def this_machine() -> str:
    """Where the id of a process means this process: in this boot, and in this namespace of ids. "" if nobody knows.

    A host name is not enough: containers may share it, and each has processes of its own.
    """
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return ""


def is_gone(machine: str, pid: int) -> bool:
    """Whether this process of a machine has surely ended: that of another machine may live."""
    if not machine or machine != this_machine():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user; or there is no such number
        return False
    with contextlib.suppress(OSError, IndexError):  # killed, and its parent has not asked for its status yet
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2][0] in "ZX"
    return False
