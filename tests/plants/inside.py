"""What runs inside a planted copy: it checks that it has imported that copy, and then searches.

`python -m plants.inside simulator PROFILE SUBJECT FIRST SECONDS` prints the first seed that breaks a rule, as JSON.
`python -m plants.inside histories SECONDS CHECK,CHECK... OPTION...` runs histories until a check finds something.
`python -m plants.inside tests|search OPTION...` runs pytest, or the exhaustive search.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import interlock

WRONG = 70  # the exit status if another copy was imported


def check() -> None:
    """End the process unless it has imported the planted copy."""
    wanted, imported = Path(os.environ["PLANTED"]).resolve(), Path(interlock.__file__).resolve()
    if not imported.is_relative_to(wanted):
        print(f"{imported} was imported in place of the copy in {wanted}", file=sys.stderr)
        sys.exit(WRONG)


def simulator(profile: str, subject: str, first: int, seconds: float) -> None:
    """Run seeds from the first one on until one breaks a rule, or the time is over."""
    from simulator import simulate

    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        violations = simulate(seed, profile, subject=subject).violations
        if violations:
            print(json.dumps({"seed": seed, "rule": violations[0].rule, "runs": seed - first + 1}))
            return
        seed += 1
    print(json.dumps({"seed": None, "rule": None, "runs": seed - first}))


def histories(seconds: float, checks: set[str], options: list[str]) -> int:
    """Run histories until one of the checks finds something, or the time is over; the last line says what was found."""
    from model.histories.cli import main as run

    sums = Path(options[options.index("--json") + 1])
    end, seed, status = time.monotonic() + seconds, 0, 0
    broken: set[str] = set()
    while not broken & checks and time.monotonic() < end:
        status = run(["--histories", "1", "--seed", str(seed), *options])
        if status not in {0, 1, 3}:  # 3: the servers did not get well, or a phase did not come about
            return status
        broken |= json.loads(sums.read_text())["violations by check"].keys()
        seed += 1
    print(json.dumps({"broken": sorted(broken), "histories": seed}))
    return int(bool(broken))


def main() -> int:
    check()
    what, *options = sys.argv[1:]
    if what == "simulator":
        profile, subject, first, seconds = options
        simulator(profile, subject, int(first), float(seconds))
        return 0
    if what == "tests":
        import pytest

        return int(pytest.main(options))
    if what == "search":
        from simulator.exhaustive.__main__ import main as search

        return search(options)
    return histories(float(options[0]), {*options[1].split(",")}, options[2:])


if __name__ == "__main__":
    sys.exit(main())
