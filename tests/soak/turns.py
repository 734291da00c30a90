"""The commands of each net; each takes fresh seeds, and continues where the last soak ended.

A turn is one command of a few seeds, so that the lanes stay busy to the end, and Ctrl-C loses little.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from simulator.profiles import ALL, WORLDS

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT: Final = Path(__file__).resolve().parents[2]
STATE: Final = PROJECT / ".soak.json"  # the next seed of each net, on this machine
FIRST_SEED: Final = 1_000_000  # the suite has the seeds below
SEEDS: Final = 200  # of the simulator a turn: half a minute
HISTORIES: Final = 3  # a turn: some minutes
TOPOLOGIES: Final = ("single", "sentinel", "cluster", "quorum")


@dataclass
class Net:
    """One net with its seeds."""

    title: str
    command: list[str]
    seeds: int = 0
    """How many seeds a turn takes; 0: the net has none, and runs once."""
    sums: Counter[str] = field(default_factory=Counter[str])
    failed: list[str] = field(default_factory=list[str])
    """The commands of the turns that failed."""
    interrupted: list[str] = field(default_factory=list[str])
    """The commands of the turns that Ctrl-C ended."""

    def turn(self, state: dict[str, int], json_file: Path) -> list[str]:
        """Return the command of the next turn, and move the next seed in `state` behind the seeds of that turn."""
        if not self.seeds:
            return self.command
        first = state.get(self.title, FIRST_SEED)
        state[self.title] = first + self.seeds
        names = ("--first", "--seeds") if "simulator" in self.command else ("--seed", "--histories")
        return [*self.command, names[0], str(first), names[1], str(self.seeds), "--json", str(json_file)]

    def add(self, json_file: Path) -> None:
        """Add what a turn wrote."""
        if not json_file.exists():
            return
        said: dict[str, Any] = json.loads(json_file.read_text())
        for ours, theirs in (
            ("runs", ("runs", "histories")),
            ("events or sections", ("events", "sections")),
            ("faults", ("faults",)),
            ("losses told", ("losses told",)),
            ("broken", ("broken", "violations")),
        ):
            self.sums[ours] += sum(said[name] for name in theirs if isinstance(said.get(name), int))


def once() -> Iterator[Net]:
    """The nets that run once."""
    yield Net("scripts/test --full", ["scripts/test", "--full"])
    yield Net("scripts/plants", ["scripts/plants"])


def endless() -> Iterator[Net]:
    """The nets that go on with fresh seeds until the time is over."""
    simulate = [sys.executable, "-m", "simulator", "--jobs", "1"]
    by_name = [name for name in ALL if not any(name in profiles for profiles in WORLDS.values())]
    nets = [Net(f"simulator, world {world}", [*simulate, "--world", world], SEEDS) for world in WORLDS]
    nets += [Net(f'simulator, "{name}"', [*simulate, "--profile", name], SEEDS // 4) for name in by_name]
    for topology in TOPOLOGIES:
        nets.append(Net(f"histories, {topology}", ["scripts/histories", "--topology", topology], HISTORIES))
    yield from nets


def load() -> dict[str, int]:
    """The next seed of each net."""
    return json.loads(STATE.read_text()) if STATE.exists() else {}


def save(state: dict[str, int]) -> None:
    """Keep the next seeds."""
    STATE.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
