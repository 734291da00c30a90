"""`scripts/bench mixed`: what processes pay while old and new locks share one key, as during a migration.

Two processes of each sort want one lock over and over for ten seconds, and hold it for a millisecond. A number is how
often all processes of a sort got the lock, how long the unluckiest of its calls waited, and how many calls gave up.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import redis

from checkouts import ROOT
from facts import about
from interlock import AcquireTimeout, Interlock
from interlock.compat import redis_py
from interlock.embedded import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PAGE: Final = ROOT / "docs" / "migration" / "redis-py.md"
NUMBERS: Final = ROOT / "docs" / "mixed.json"
BLOCK: Final = re.compile(r"(<!-- mixed -->\n).*?(<!-- end of mixed -->)", re.DOTALL)
OURS, DROP_IN, REDIS_PY = "`lock()`", "the drop-in", "redis-py's Lock"
PAIRS: Final = ((REDIS_PY, REDIS_PY), (DROP_IN, REDIS_PY), (OURS, REDIS_PY), (OURS, DROP_IN), (OURS, OURS))
PROCESSES: Final = 2  # of each sort
HOLD: Final = 0.001  # seconds
PAUSES: Final = (0.0, 0.01)  # seconds between two sections of a process
TIMEOUT: Final = 5.0  # seconds, after which a call gives up
NAME: Final = "stock:42"


def _sections(sort: str, url: str) -> Callable[[], bool]:
    """One section, with this sort of lock. False if the call gave up."""
    if sort == OURS:
        ours = Interlock(url, prefix="").lock(NAME, timeout=TIMEOUT)

        def section() -> bool:
            try:
                with ours:
                    time.sleep(HOLD)
            except AcquireTimeout:
                return False
            return True

        return section
    cls = redis_py.Lock if sort == DROP_IN else redis.lock.Lock
    lock = cls(redis.Redis.from_url(url), NAME, timeout=30, blocking_timeout=TIMEOUT)

    def section_of_redis_py() -> bool:
        if not lock.acquire():
            return False
        time.sleep(HOLD)
        lock.release()
        return True

    return section_of_redis_py


def _worker(sort: str, url: str, pause: float, seconds: float) -> None:
    section = _sections(sort, url)
    print(flush=True)
    sys.stdin.readline()
    ends, longest, got, gave_up = time.monotonic() + seconds, 0.0, 0, 0
    while (began := time.monotonic()) < ends:
        if section():
            got += 1
        else:
            gave_up += 1
        longest = max(longest, time.monotonic() - began - HOLD)
        time.sleep(pause)
    print(json.dumps([got, longest, gave_up]), flush=True)


def measure_pair(pair: tuple[str, str], pause: float, seconds: float) -> list[list[float]]:
    """Of each side: sections a second, the longest wait, and how many calls gave up."""
    with Server() as server:
        words = [sys.executable, str(ROOT / "bench" / "mixed.py")]
        sides = [
            [
                subprocess.Popen(
                    [*words, sort, server.url, str(pause), str(seconds)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
                for _ in range(PROCESSES)
            ]
            for sort in pair
        ]  # fmt: skip
        workers = [worker for side in sides for worker in side]
        try:
            for worker in workers:
                assert worker.stdout.readline()
            for worker in workers:
                worker.stdin.write("\n")
                worker.stdin.flush()
            found = []
            for side in sides:
                said = [json.loads(worker.stdout.readline()) for worker in side]
                got, longest, gave_up = zip(*said, strict=True)
                found.append([sum(got) / seconds, max(longest), sum(gave_up)])
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    return found


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """The numbers of all pairs, round by round."""
    found: list[dict[str, Any]] = [
        {"pair": pair, "pause": pause, "rounds": []} for pause in PAUSES for pair in PAIRS
    ]  # fmt: skip
    for number in range(rounds):
        for each in found:
            each["rounds"].append(measure_pair(each["pair"], each["pause"], seconds))
            print(f"mixed: {number + 1} of {rounds}: {each['pair']}, {each['rounds'][-1]}", file=sys.stderr, flush=True)
    with Server() as server:
        ran_with = about(str(server.socket), "redis")
    return {"about": ran_with, "seconds": seconds, "found": found}


def table(numbers: Mapping[str, Any]) -> str:
    """The table of the page: medians; of the waits the longest; of the calls that gave up the sum."""
    lines = [
        "| pause | two processes with | beside two with | sections/s | longest wait | gave up |",
        "|---|---|---|---|---|---|",
    ]
    for each in numbers["found"]:
        sides = [[*zip(*side, strict=True)] for side in zip(*each["rounds"], strict=True)]
        rates = " : ".join(f"{statistics.median(rate):,.0f}" for rate, _, _ in sides)
        waits = " : ".join(f"{max(longest):.1f} s" for _, longest, _ in sides)
        gave_up = " : ".join(f"{sum(count):,.0f}" for _, _, count in sides)
        pause = f"{each['pause'] * 1000:.0f} ms" if each["pause"] else "none"
        lines.append(f"| {' | '.join([pause, *each['pair'], rates, waits, gave_up])} |")
    ran_with = ", ".join(f"{key} {value}" for key, value in numbers["about"].items())
    rounds = len(numbers["found"][0]["rounds"])
    about_it = f"{rounds} rounds of {numbers['seconds']:g} s, by `scripts/bench mixed`: {ran_with}."
    return "\n".join([*lines, "", about_it])


def page_with(page: str, numbers: Mapping[str, Any]) -> str:
    """The page with the table of these numbers."""
    return BLOCK.sub(lambda block: f"{block[1]}{table(numbers)}\n{block[2]}", page)


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="scripts/bench mixed", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measure each pair so often (3)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="each time for so long (10)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} and {NUMBERS.name}")
    parser.add_argument("--again", action="store_true", help=f"measure nothing: the numbers of {NUMBERS.name}")
    options = parser.parse_args(arguments)
    if options.again:
        numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    else:
        numbers = measure(options.rounds, options.seconds)
    print(table(numbers))
    if options.write:
        NUMBERS.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), numbers), encoding="utf-8")


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
