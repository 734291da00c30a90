"""`scripts/bench outages`: how long people wait for a lock when its server fails, is restarted or replaced.

Theory. Each contender uses a lock of its own over and over, and two threads write to the same server, each up to a
thousand times a second. Then a fault meets that server. The number of a contender is the longest time without a grant,
from the fault or an earlier grant after it on: nearly always the time until the first grant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.sentinel import Sentinel

from checkouts import ROOT
from facts import about
from harness.servers import Node
from harness.topology import Cluster, Sentinels
from harness.topology.group import GONE, ask, wait
from interlock import Interlock
from interlock.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PAGE: Final = ROOT / "docs" / "failover.md"
NUMBERS: Final = ROOT / "docs" / "outages.json"
BLOCK: Final = re.compile(r"(<!-- outages -->\n).*?(<!-- end of outages -->)", re.DOTALL)

ABOUT = """\
Measures the longest time for which a lock in use is granted to nobody while its server is
killed, restarted or replaced: one server, Sentinel, a cluster. Five minutes for each round.
"""
MORE = """\
examples:
  scripts/bench outages                    print the table
  scripts/bench outages sentinel-kill      only this fault
  scripts/bench outages --write            also put the table into docs/failover.md
  scripts/bench outages --again --write    write the recorded numbers again
  scripts/bench outages --quick            max_ttl of 1 and 2 s, one round; the numbers mean nothing
"""

WRITERS: Final = 2  # threads that keep the servers busy
BETWEEN: Final = 0.01  # seconds between two sections of a contender, and between two tries after an error
BEFORE: Final = 1.0  # seconds for which all contenders work before the fault
MARGIN: Final = 90.0  # seconds, beyond max_ttl, after which a contender that got no grant counts as hung
HAS_LOG: Final = {"appendonly": "yes", "appendfsync": "always"}
TWO_COPIES: Final = {"min-replicas-to-write": "1", "min-replicas-max-lag": "5"}  # as docs/failover.md advises
DOWN_AFTER: Final = 0.5  # seconds, of Sentinel
NODE_TIMEOUT: Final = 1.0  # seconds, of the cluster
MAX_TTLS: Final = (30.0, 9.0)
REDIS_PY: Final = "redis-py's Lock"
ENGINES: Final = {"one": "one server", "sentinel": "Sentinel", "cluster": "cluster"}

Rig = Any  # a Node, Sentinels or a Cluster


# The faults. Each returns when the servers serve again, as far as they can say.


def _stop(node: Node) -> None:
    with contextlib.suppress(*GONE):
        ask(node, "SHUTDOWN")
    wait(lambda: "the server has not shut down" if node.running else "")
    node.kill()


def _restart(rig: Rig) -> None:
    """SHUTDOWN of the primary, which waits for its replicas; the process is started again at once."""
    node = _primary(rig)
    _stop(node)
    node.restart()
    if not isinstance(rig, Node):
        rig.wait_ok()


def _kill_sentinel(rig: Sentinels) -> None:
    old = rig.primary
    old.kill()
    rig.wait_for_primary(old)


def _kill_cluster(rig: Cluster) -> None:
    _primary(rig).kill()
    rig.wait_ok()


def _coordinated(rig: Sentinels) -> None:
    old = rig.primary
    ask(rig.sentinels[0], "SENTINEL", "FAILOVER", "mymaster", "COORDINATED")
    rig.wait_for_primary(old)


@dataclass(frozen=True)
class Fault:
    """A fault, in words, and the function that does it."""

    engine: str
    what: str
    strike: Callable[[Any], object]


FAULTS: Final[dict[str, Fault]] = {
    "one-restart": Fault("one", "restarted (`appendfsync always`)", _restart),
    "sentinel-kill": Fault("sentinel", "the primary is killed", _kill_sentinel),
    "sentinel-restart": Fault("sentinel", "the primary is restarted", _restart),
    "sentinel-failover": Fault("sentinel", "`SENTINEL FAILOVER`", lambda rig: rig.failover()),
    "sentinel-coordinated": Fault("sentinel", "`SENTINEL FAILOVER … COORDINATED` (Valkey 9)", _coordinated),
    "sentinel-handover": Fault("sentinel", "`FAILOVER`, then `SENTINEL FAILOVER`", lambda rig: rig.handover()),
    "cluster-kill": Fault("cluster", "a primary is killed", _kill_cluster),
    "cluster-restart": Fault("cluster", "a primary is restarted", _restart),
    "cluster-takeover": Fault(
        "cluster", "`CLUSTER FAILOVER TAKEOVER`", lambda rig: rig.failover(_replica(rig), takeover=True)
    ),
    "cluster-failover": Fault("cluster", "`CLUSTER FAILOVER`", lambda rig: rig.failover(_replica(rig))),
}


def _rig(engine: str) -> Rig:
    if engine == "one":
        return Node(config=HAS_LOG)
    if engine == "sentinel":
        return Sentinels(config=HAS_LOG | TWO_COPIES, down_after=DOWN_AFTER)
    return Cluster(config=HAS_LOG, node_timeout=NODE_TIMEOUT)


def _url(rig: Rig) -> str:
    return rig.tcp_url if isinstance(rig, Node) else rig.url


def _primary(rig: Rig) -> Node:
    """The server with the lock of each contender."""
    return rig if isinstance(rig, Node) else rig.primary if isinstance(rig, Sentinels) else rig.primary_of("{a}")


def _replica(rig: Cluster) -> Node:
    return rig.replica_of(_primary(rig))


# The contenders


def _plain(rig: Rig) -> Any:
    """A client of redis-py for this rig."""
    if isinstance(rig, Sentinels):
        hosts = [("127.0.0.1", sentinel.public) for sentinel in rig.sentinels]
        return Sentinel(hosts).master_for("mymaster")
    if isinstance(rig, Cluster):
        return redis.RedisCluster(host="127.0.0.1", port=rig.nodes[0].public)
    return redis.Redis(port=rig.port)


class Contender(threading.Thread):
    """Uses a lock over and over. `longest`: the longest time without a grant after the fault, in seconds."""

    def __init__(self, lock: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._lock = lock
        self._struck_at = self._served_at = float("inf")
        self._ends = threading.Event()
        self.longest = 0.0
        self.is_ready = threading.Event()  # it has had its first section
        self.is_through = threading.Event()  # it has had a grant that it asked for when the servers served again

    def run(self) -> None:
        """Use the lock until `end()`."""
        granted_at = 0.0
        while not self._ends.wait(BETWEEN):
            began = time.monotonic()
            lock = self._acquired()
            if lock is None:
                return
            before, granted_at = granted_at, time.monotonic()
            if granted_at > self._struck_at:
                self.longest = max(self.longest, granted_at - max(before, self._struck_at))
            if began > self._served_at:
                self.is_through.set()
            with contextlib.suppress(LockError, redis.RedisError):  # what is lost is free when its ttl is over
                lock.release()
            self.is_ready.set()

    def _acquired(self) -> Any:
        """What has the grant now: a lease, or a lock of redis-py. None if there is no more time."""
        while not self._ends.is_set():
            with contextlib.suppress(LockError, redis.RedisError):
                lock = self._lock()
                granted = lock.acquire()
                if granted:
                    return lock if granted is True else granted
            self._ends.wait(BETWEEN)
        return None

    def strikes(self) -> None:
        """The fault begins now."""
        self._struck_at = time.monotonic()

    def serves(self) -> None:
        """The servers serve again."""
        self._served_at = time.monotonic()

    def end(self) -> None:
        """Stop soon."""
        self._ends.set()


def _write(client: Any, ends: threading.Event) -> None:
    number = 0
    while not ends.wait(0.001):
        number += 1
        with contextlib.suppress(redis.RedisError):
            client.set(f"{{a}}:{number % 1000}", number)


def _measure(fault: Fault, max_ttls: Sequence[float]) -> dict[str, float]:
    """Contender -> seconds. Raises TimeoutError if a contender gets no grant."""
    ends = threading.Event()
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(_rig(fault.engine))
        stack.callback(ends.set)
        contenders: dict[str, Contender] = {}
        for max_ttl in max_ttls:
            locks = stack.enter_context(Interlock(_url(rig), max_ttl=max_ttl))
            lock = locks.lock(f"{{a}}:{max_ttl:g}")
            contenders[_ours(max_ttl)] = Contender(lambda lock=lock: lock)
        plain = _plain(rig)
        contenders[REDIS_PY] = Contender(lambda: plain.lock("lock:{a}:plain", timeout=max(max_ttls)))
        writers = [threading.Thread(target=_write, args=(_plain(rig), ends), daemon=True) for _ in range(WRITERS)]
        for thread in (*writers, *contenders.values()):
            thread.start()
        for contender in contenders.values():
            stack.callback(contender.end)
        if not all(contender.is_ready.wait(MARGIN) for contender in contenders.values()):
            raise TimeoutError("a contender does not get its lock before the fault")
        time.sleep(BEFORE)
        for contender in contenders.values():
            contender.strikes()
        fault.strike(rig)
        limit = time.monotonic() + max(max_ttls) + MARGIN
        for name, contender in contenders.items():
            contender.serves()
            if not contender.is_through.wait(max(0.0, limit - time.monotonic())):
                raise TimeoutError(f"{fault.engine}, {fault.what}: {name} gets no grant")
        for contender in contenders.values():
            contender.end()
            contender.join(MARGIN)
        ends.set()
        for writer in writers:
            writer.join(MARGIN)
        return {name: round(contender.longest, 2) for name, contender in contenders.items()}


def _ours(max_ttl: float) -> str:
    return f"max_ttl={max_ttl:g}"


def measure(names: Sequence[str], rounds: int, max_ttls: Sequence[float] = MAX_TTLS) -> dict[str, Any]:
    """The numbers of these faults: seconds, for each contender and round."""
    logging.getLogger("interlock").setLevel(logging.CRITICAL)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for number in range(rounds):
        for name in names:
            for contender, seconds in _measure(FAULTS[name], max_ttls).items():
                found[name].setdefault(contender, []).append(seconds)
            print(f"outages: {name}, {number + 1} of {rounds}: {found[name]}", file=sys.stderr, flush=True)
    with Node() as node:
        ran_with = about(str(node.socket), "redis")
    return {"about": ran_with, "seconds": found}


def table(numbers: Mapping[str, Any]) -> str:
    """The table of docs/failover.md."""
    contenders = list(next(iter(numbers["seconds"].values())))
    titles = [f"`{each}`" if "=" in each else f"{each} (unsafe)" for each in contenders]
    lines = [f"| servers | what happens | {' | '.join(titles)} |", "|---|---|" + "---|" * len(contenders)]
    for name, found in numbers["seconds"].items():
        fault = FAULTS[name]
        cells = [_shown(statistics.median(found[contender])) for contender in contenders]
        lines.append(f"| {' | '.join([ENGINES[fault.engine], fault.what, *cells])} |")
    rounds = len(next(iter(found.values())))
    ran_with = ", ".join(f"{key} {value}" for key, value in numbers["about"].items())
    settings = (
        f"`down-after-milliseconds {DOWN_AFTER * 1000:.0f}`, `cluster-node-timeout {NODE_TIMEOUT * 1000:.0f}`, "
        "`min-replicas-max-lag 5`"
    )
    about_it = f"Medians of {rounds}, by `scripts/bench outages`: {settings}; {ran_with}."
    return "\n".join([*lines, "", about_it])


def _shown(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def page_with(page: str, numbers: Mapping[str, Any]) -> str:
    """The page with the table of these numbers."""
    return BLOCK.sub(lambda block: f"{block[1]}{table(numbers)}\n{block[2]}", page)


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench outages",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"{', '.join(FAULTS)}; all of them by default")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measure each so often (3)")
    parser.add_argument("--write", action="store_true", help=f"write {_short(PAGE)} and {_short(NUMBERS)}")
    parser.add_argument("--again", action="store_true", help=f"measure nothing: the numbers of {_short(NUMBERS)}")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead")
    parser.add_argument("--quick", action="store_true", help="small max_ttl, once; the numbers mean nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.faults if name not in FAULTS]:
        parser.error(f"there is no fault {', '.join(unknown)}. The faults are {', '.join(FAULTS)}")
    if options.write and (options.faults or options.quick):
        parser.error("--write needs all faults, and not --quick")
    if options.again:
        numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    elif options.quick:
        numbers = measure(options.faults or list(FAULTS), 1, (2.0, 1.0))
    else:
        numbers = measure(options.faults or list(FAULTS), options.rounds)
    print(json.dumps(numbers, indent=1, ensure_ascii=False) if options.json else table(numbers))
    if options.write:
        NUMBERS.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), numbers), encoding="utf-8")


def _short(path: Any) -> str:
    return str(path.relative_to(ROOT))
