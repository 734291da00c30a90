"""`scripts/bench growth`: measures the curves, prints their tables, and writes both with pictures into the docs."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markdown import Markdown

from checkouts import ROOT
from facts import about
from growth import check, clients, model, plots, server
from growth.curves import Costs, Curve, Series, over_sizes
from growth.sender import Sender
from interlock.embedded import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

PAGE = ROOT / "docs" / "growth.md"
PICTURES = ROOT / "docs" / "growth"
NUMBERS = PICTURES / "numbers.json"
BLOCK = re.compile(r"(<!-- growth: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

ABOUT = """\
Measures what many waiters, holders, readers, locks, processes and clients cost, prints a
table for each, and compares the model of docs/growth.md with what the simulator and real
clients count. About four minutes on two quiet cores.
"""
MORE = """\
examples:
  scripts/bench growth                 print the tables
  scripts/bench growth waiters names   only these
  scripts/bench growth --write         also put them into docs/growth.md, the pictures beside it
  scripts/bench growth --again         print (or with --write, write) the recorded numbers again
  scripts/bench growth --quick         every line of code once; the numbers mean nothing
"""

CROWD = model.Load(clients=2000, names=200, hold=1.0)  # of real clients, for the check of the model
SIMULATED = (
    model.Load(1000, 100, 1.0), model.Load(300, 30, 25.0),
)  # fmt: skip
SETTLE = 0.2  # seconds in which the server forgets the connections of the measurement before
SIMULATED_SECONDS = 50.0  # virtual; two turns of the second


@dataclass(frozen=True)
class Spec:
    """A curve to measure."""

    what: str
    of: str
    sizes: tuple[int, ...]
    rounds: int
    measure: Callable[[Machine, int], Costs]
    quick: int = 10  # the size of a quick run


@dataclass(frozen=True)
class Machine:
    """Where it is measured: a private server, and for how long."""

    path: str
    sender: Sender
    seconds: float


TENS = (10, 100, 1000, 10_000)
SPECS: dict[str, Spec] = {
    "waiters": Spec("Waiters of one lock", "waiters", TENS, 5, lambda at, n: server.waiters(at.sender, n)),
    "permits": Spec(
        "A semaphore of so many permits, all held", "permits", TENS, 5, lambda at, n: server.permits(at.sender, n)
    ),
    "readers": Spec("Readers of one lock", "readers", TENS, 5, lambda at, n: server.readers(at.sender, n)),
    "names": Spec(
        "Locks, each held, each with one waiter", "locks", TENS, 5, lambda at, n: server.names(at.sender, n), 1000
    ),
    "connections": Spec(
        "Connections at work at once, ten for each lock", "connections", (10, 100, 1000, 3000), 3,
        lambda at, n: server.connections(at.sender, at.path, n),
    ),
    "processes": Spec(
        "Processes in and out of one lock", "processes", (10, 25, 50, 100, 200), 2,
        lambda at, n: clients.run("processes", at.path, n, at.seconds),
    ),
    "one-client": Spec(
        "Locks for which one client waits", "locks", (100, 1000, 10_000), 2,
        lambda at, n: clients.run("one_client", at.path, n, 2 * at.seconds),
    ),
    "clients": Spec(
        "Clients that wait, ten for each lock, held for a second", "clients", (100, 500, CROWD.clients), 1,
        lambda at, n: clients.run("many_clients", at.path, n, n * CROWD.names // CROWD.clients, CROWD.hold, at.seconds),
        20,
    ),
}  # fmt: skip
UNITS = {
    clients.SECTIONS: "1/s", clients.MIDDLE_WAIT: "ms", clients.LONGEST_WAIT: "ms", clients.PRIVATE: "MB",
    clients.LEAST_SHARE: "% of an equal share", clients.CALLS: "", clients.LOST: "", clients.BEATS: "1/s",
    clients.MESSAGES: "1/s", clients.BEAT_SHARE: "% of a core",
}  # fmt: skip
ALL_OF_MODEL = {"connections", "clients", "names"}  # the curves from which the model takes its costs


def _unit(series: str) -> str:
    return UNITS.get(series, "bytes" if "memory" in series else "µs")


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench growth",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=f"{', '.join(SPECS)}; all of them by default")
    parser.add_argument("--write", action="store_true", help=f"write {_short(PAGE)} and {_short(PICTURES)}/")
    parser.add_argument("--again", action="store_true", help=f"measure nothing: the numbers of {_short(NUMBERS)}")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead")
    parser.add_argument("--quick", action="store_true", help="small crowds, once; the numbers mean nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.curves if name not in SPECS]:
        parser.error(f"there is no curve {', '.join(unknown)}. The curves are {', '.join(SPECS)}")
    if options.write and (options.curves or options.quick):
        parser.error("--write needs all curves, and not --quick")
    if options.again:
        numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    else:
        numbers = measure(options.curves or list(SPECS), quick=options.quick)
    if options.json:
        print(json.dumps(numbers, indent=1, ensure_ascii=False))
    else:
        show(Console(width=None if sys.stdout.isatty() else 112), numbers)
    if options.write:
        write(numbers)


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Measuring


def measure(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Measure these curves on a private server, and check the model if all that it needs is among them."""
    curves: dict[str, Curve] = {}
    with Server() as embedded:
        path = str(embedded.socket)
        sender = Sender(path)
        machine = Machine(path, sender, 0.5 if quick else 5.0)
        for name in names:
            curves[name] = _measured(name, SPECS[name], machine, quick=quick)
        ran_with = about(path)
        sender.close()
    checks = _checks(curves["clients"], quick=quick) if {*curves} >= ALL_OF_MODEL else []
    return {
        "about": ran_with, "curves": {name: curve.as_json() for name, curve in curves.items()},
        "checks": [counted._asdict() for counted in checks],
    }  # fmt: skip


def _measured(name: str, spec: Spec, machine: Machine, *, quick: bool) -> Curve:
    sizes = [spec.quick] if quick else [*spec.sizes]
    rounds = 1 if quick else spec.rounds
    done = [0]

    def tell() -> None:
        done[0] += 1
        if sys.stderr.isatty() or done[0] == rounds * len(sizes):
            print(f"growth: {name}, {done[0]} of {rounds * len(sizes)}", file=sys.stderr, flush=True)

    def of(size: int) -> Costs:
        machine.sender.bare.call("FLUSHALL")  # else keys of before expire meanwhile, and memory shrinks
        time.sleep(SETTLE)
        return spec.measure(machine, size)

    found = over_sizes(sizes, rounds, of, tell)
    return Curve(
        name, spec.what, spec.of, sizes,
        [Series(series, _unit(series), [*map(_rounded, values)]) for series, values in found.items()],
    )  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.4g}")


def _checks(curve: Curve, *, quick: bool) -> list[check.Counted]:
    """The model beside the simulator, and beside the largest crowd of real clients."""
    checks: list[check.Counted] = []
    sys.path.append(str(ROOT))
    try:
        from growth import simulated
    except ImportError as missing:
        print(f"growth: the simulator is left out: {missing}", file=sys.stderr)
    else:
        for load in SIMULATED[1:2] if quick else SIMULATED:
            checks += check.of_simulator(load, simulated.count(load, SIMULATED_SECONDS))
    size = curve.sizes[-1]
    load = model.Load(size, size * CROWD.names // CROWD.clients, CROWD.hold)
    checks.append(
        check.Counted(
            "real clients", size, load.names, load.hold, _rounded(load.calls) or 0.0, curve.last(clients.MESSAGES)
        )
    )
    return checks


# Showing


def blocks(numbers: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the page that the numbers make, by name."""
    curves = {name: Curve.from_json(data) for name, data in numbers["curves"].items()}
    found = {name: curve.markdown() for name, curve in curves.items()}
    if {*curves} >= ALL_OF_MODEL:
        costs = model.Costs.of(curves)
        found["costs"] = costs.markdown()
        found["model"] = model.table(costs)
        found["limits"] = model.limits(costs)
    if numbers["checks"]:
        found["check"] = check.table([check.Counted(**data) for data in numbers["checks"]])
    found["about"] = ", ".join(f"{key} {value}" for key, value in numbers["about"].items()) + "."
    return found


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    """Print the tables."""
    for name, data in numbers["curves"].items():
        curve = Curve.from_json(data)
        console.print(f"\n[bold]{name}[/]  {curve.what}", highlight=False)
        console.print(curve.table())
    for name, text in blocks(numbers).items():
        if name not in SPECS:
            console.print(f"\n[bold]{name}[/]", highlight=False)
            console.print(Markdown(text))


def page_with(page: str, numbers: Mapping[str, Any]) -> str:
    """The page with these numbers in its blocks."""
    found = blocks(numbers)
    return BLOCK.sub(lambda block: f"{block[1]}{found[block[2]]}\n{block[3]}", page)


def write(numbers: Mapping[str, Any]) -> None:
    """Write the numbers, the page and the pictures."""
    PICTURES.mkdir(exist_ok=True)
    NUMBERS.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), numbers), encoding="utf-8")
    plots.draw({name: Curve.from_json(data) for name, data in numbers["curves"].items()}, PICTURES)
