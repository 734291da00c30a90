"""The model's predictions beside what the simulator and real clients count."""

from __future__ import annotations

from typing import NamedTuple

from growth.model import CALLS_PER_HANDOVER, Load


class Counted(NamedTuple):
    """One way to count, and what it counted a second."""

    where: str
    clients: int
    names: int
    hold: float
    predicted: float
    counted: float
    what: str = "script calls"

    def markdown(self) -> str:
        return (
            f"| {self.where} | {self.clients:,} | {self.names:,} | {self.hold:g} s | {self.what} | "
            f"{self.predicted:,.0f} | {self.counted:,.0f} | {self.predicted / self.counted - 1:+.1%} |"
        )


def table(checks: list[Counted]) -> str:
    head = "| counted by | clients | locks | held for | a second | model | counted | model is off by |"
    return "\n".join([head, "|---" * 8 + "|", *(check.markdown() for check in checks)])


def of_simulator(load: Load, found: dict[str, float]) -> list[Counted]:
    """Each kind of message by itself."""
    of = ("the simulator", load.clients, load.names, load.hold)
    checks = [
        Counted(*of, load.heartbeats, found["heartbeat"], "heartbeats"),
        Counted(*of, CALLS_PER_HANDOVER * load.handovers, found["acquire"] + found["release"], "calls of handovers"),
    ]
    if load.renewals:
        checks.append(Counted(*of, load.renewals, found["renew"], "renewals"))
    return checks
