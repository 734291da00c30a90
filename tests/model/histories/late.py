"""How long processes were ready to run and got no processor, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


class Lateness:
    """How long each process has waited for a processor, from look to look."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, int]] = {}  # pid -> thread -> ns in the queue for a processor

    def grown(self, pid: int) -> float:
        """Seconds since the last look for which the unluckiest thread of this process waited for a processor."""
        before, now = self._seen.get(pid), _delays(pid)
        self._seen[pid] = now
        if before is None:
            return 0.0
        return max((ns - before.get(thread, ns) for thread, ns in now.items()), default=0) / 1e9


def _delays(pid: int) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found[task.name] = int((task / "schedstat").read_text().split()[1])
    except (OSError, IndexError):  # the process has ended, or this kernel does not count
        pass
    return found
