"""The phases: scenes between the random faults, each directed at one promise.

Theory. Random faults seldom meet at the moment that matters: a lease of the longest ttl that was granted just before
its server lost it; a holder that stands still over its deadline while others wait. A phase brings that moment about.
While it plays, no other fault strikes, and no worker process begins: a process that has never met the servers before
they lose their data cannot know of the loss, and interlock promises nothing then (docs/failover.md).

A phase gives *orders* to worker processes: play this turn, once or for a while (`Order`). What the workers write is
judged as everything else; a phase judges nothing itself. It returns what it did, or raises `Absent` if the moment did
not come.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from harness.topology.group import ask
from model.histories import faults
from model.histories.lines import clock
from model.histories.settings import OUTLASTS_FAILOVER, PLAIN, SCENE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from model.histories.history import Controller, Worker
    from model.histories.rigs import Line
    from model.histories.settings import Turn

LONGEST: Final = 20.0  # seconds that servers may take for a failover
GRANT: Final = 4.0  # seconds within which the holder of a phase gets its lock
COHORT_TTL: Final = 1.0  # seconds: the shortest ttl of a lease that passes on
AFTER: Final = 0.4  # seconds for which those that wait go on after the end of the lease


class Absent(Exception):
    """The moment that the phase wants did not come."""


def lost_grant(run: Controller, random: Random) -> str:
    """A lease of the longest ttl, which nobody renews, is lost by the servers just after its grant.

    The replicas get no more writes, or the server's disk is set back; then the server is killed. The next holder must
    wait until that lease has run out. Mostly the first one stands still meanwhile, so that it does not learn of the
    loss, and relies on its lease for as long as it may.
    """
    name, ttl = _name(run), run.settings.max_ttl
    assert ttl is not None
    holder, others = _parts(run, random)
    # First wait for the end of an earlier quarantine: meanwhile a replica would be cut off for too long to be promoted.
    _hold(run, holder, PLAIN.but(names=(name,)), GRANT + ttl + run.rig.grace)
    losing = {"single": _set_back, "quorum": _lose_votes}.get(run.settings.topology, _promote_lagging)
    with losing(run, random, name, holder) as lose:
        turn = PLAIN.but(names=(name,), ttl=ttl, renew=False, seconds=1.2 * ttl, style=_style(random))
        got = _hold(run, holder, turn)
        _crowd(run, others, name, ttl + run.rig.grace + 2.0)
        # A failover, and the grace behind it, take half of that lease already.
        slow = run.settings.topology in OUTLASTS_FAILOVER
        goes_on = got + ttl * random.uniform(0.75 if slow else 0.5, 0.95)
        with run.stopped(holder) if slow or random.random() < 0.7 else nullcontext():
            about = lose()
            run.sleep(max(0.0, goes_on - clock()))
        run.sleep(max(0.0, got + ttl + AFTER - clock()))
    return f"{name} for {ttl:g} s by {holder.name}, {about}"


@contextmanager
def _set_back(run: Controller, random: Random, _name: str, _holder: Worker) -> Iterator[Any]:
    """The one server comes back without what was written last, or empty."""
    # An earlier version believes that appendfsync always loses nothing, even if the disk of the server was set back.
    copied = random.random() < 0.25 and not run.settings.older
    if copied:
        run.rig.keep_copy()

    def lose() -> str:
        time.sleep(random.choice((0.0, random.uniform(0.0, 0.05))))
        run.rig.restart_without(copied=copied)
        return "the server set back" if copied else "the server emptied"

    yield lose


@contextmanager
def _lose_votes(run: Controller, random: Random, _name: str, holder: Worker) -> Iterator[Any]:
    """So many of three servers lose the lease, in one of several ways, that it has no majority any more.

    Behind lines the holder mostly reaches two of them only, and then one loss is enough.
    """
    others = [*range(len(run.rig.nodes))]
    random.shuffle(others)
    lines = run.rig.lines[others[2] : others[2] + 1] if random.random() < 0.7 and not run.settings.older else []
    losers = others[: 1 if lines else 2]
    nodes = [run.rig.nodes[number] for number in losers]
    ways = ["emptied", "flushed"] if not run.settings.shorter else []  # else nothing is promised: see rigs.Quorum
    if not run.settings.older:
        ways += ["set-back", *(["re-seeded-old", "re-seeded", "spare"] if lines else [])]
    way = random.choice(ways)
    for node in nodes:
        if way == "set-back":
            faults.keep_copy(run, node)
        elif way in {"re-seeded-old", "spare"}:
            faults.copy(run, node, run.rig.spare)

    def lose() -> str:
        for number, node in zip(losers, nodes, strict=True):
            match way:
                case "emptied":
                    node.restart()
                case "flushed":
                    ask(node, "FLUSHALL")
                case "set-back":
                    faults.restart_from_copy(node)
                case "re-seeded-old":
                    faults.reseed(run, node, run.rig.spare)
                case "re-seeded":
                    faults.reseed(run, node, run.rig.nodes[others[2]])
                case "spare":
                    run.rig.take_over(number)
        return f"{len(nodes)} servers lost it: {way}"

    for line in lines:
        line.mute(holder.pid)
    try:
        yield lose
    finally:
        for line in lines:
            line.let_go()
        if way in {"re-seeded-old", "spare"}:
            ask(run.rig.spare, "FLUSHALL")  # the next time it is a spare


@contextmanager
def _promote_lagging(run: Controller, _random: Random, name: str, _holder: Worker) -> Iterator[Any]:
    """A replica that lacks the latest writes becomes the primary."""
    group: Any = run.rig.group
    group.wait_ok(timeout=LONGEST)
    sharded, key = run.settings.topology == "cluster", f"lock:{name}"
    old = group.primary_of(key) if sharded else group.primary
    replicas = [group.replica_of(old)] if sharded else list(group.replicas)
    try:
        if not sharded:  # else it would refuse all writes without its replicas; it is killed before it could stay alone
            ask(old, "CONFIG", "SET", "min-replicas-to-write", 0)
        group.lag(*replicas)

        def lose() -> str:
            old.kill()
            group.heal()  # they may follow each other again: the lease is gone, and a primary alone refuses all writes
            new = run.rig.await_primary(old, key, LONGEST)
            return f"port {old.port} killed, port {new.port} promoted"

        yield lose
    finally:
        if old.running:
            if not sharded:
                ask(old, "CONFIG", "SET", "min-replicas-to-write", 1)
        else:
            old.restart()
        group.heal()
        group.wait_ok(timeout=2 * LONGEST)


def stopped_holder(run: Controller, random: Random) -> str:
    """A holder stands still from just before its deadline until after it, while others wait for its lock.

    Then all callers of a cohort do, so that a section which ends too late could pass its lease on.
    """
    return f"{_stopped_alone(run, random)}; {_stopped_cohort(run, random)}"


def _stopped_alone(run: Controller, random: Random) -> str:
    name, (holder, others) = _name(run), _parts(run, random)
    ttl, before, after = random.choice((0.4, 0.6, 0.8)), random.uniform(0.0, 0.06), random.uniform(0.05, 0.5)
    turn = PLAIN.but(names=(name,), ttl=ttl, renew=False, seconds=2 * ttl, style=_style(random))
    got = _hold(run, holder, turn)
    _crowd(run, others, name, ttl + after + AFTER)
    run.sleep(max(0.0, got + ttl - before - clock()))
    with run.stopped(holder):
        run.sleep(before + after)
    run.sleep(AFTER)
    return f"{holder.name} from {before * 1000:.0f} ms before its deadline until {after * 1000:.0f} ms after it"


def _stopped_cohort(run: Controller, random: Random) -> str:
    name, (holder, others) = _name(run), _parts(run, random)
    stops, away = 4, COHORT_TTL + random.uniform(0.05, 0.2)
    lasts = stops * (away + AFTER) + AFTER
    run.order(holder, PLAIN.but(names=(name,), ttl=COHORT_TTL, seconds=0.05, pause=0.0), workers=4, seconds=lasts)
    _crowd(run, others, name, lasts, waiting=False)  # a cohort behind which others wait passes on for 10 ms only
    for _ in range(stops):
        run.sleep(random.uniform(0.5, 1.0) * AFTER)
        with run.stopped(holder):
            run.sleep(away)
    run.sleep(AFTER)
    return f"{holder.name} with a cohort, {stops} times for {away:.2f} s"


def late_reply(run: Controller, random: Random) -> str:
    """A reply is held back for longer than the margin of the lease: to an acquire, an extend, or a renewal.

    Behind that request none gets through, so the lease runs out by itself, and a deadline that does not count from the
    sending is too late by as much as the reply.
    """
    three = random.sample(("acquire", "extend", "renewal"), 3)
    return "to the " + ", ".join([_late_reply(run, random, which) for which in three])


def _late_reply(run: Controller, random: Random, which: str) -> str:
    name, (holder, others), ttl = _name(run), _parts(run, random), random.choice((0.5, 0.7))
    # A renewal must be answered before the next one is tried, and a server of a quorum far sooner.
    longest = 0.1 if run.settings.topology == "quorum" else 0.3 if which == "renewal" else 0.7
    late = ttl * longest * random.uniform(0.4, 1.0)
    turn = PLAIN.but(names=(name,), ttl=ttl, renew=which == "renewal", seconds=4 * ttl, style=_style(random))
    if which == "extend":
        turn = turn.but(extends=True, extends_to=ttl)
    lines = _lines(run, name)
    with ExitStack() as stack:
        for line in run.rig.lines:
            line.hold_back(holder.pid, "acquire" if which == "acquire" else "renew", name, late)
            stack.callback(line.let_go)
        _hold(run, holder, turn)
        _crowd(run, others, name, 2 * ttl + late)
        end = clock() + ttl
        while not all(line.caught.is_set() for line in lines):
            if clock() > end:
                raise Absent(f"there was no {which}")
            run.sleep(0.002)
        for line in run.rig.lines:
            line.mute(holder.pid)
        run.sleep(ttl + late + AFTER)
        if min(line.late for line in lines) < late:
            raise Absent(f"the reply to the {which} was not late")
    return f"{which} of {holder.name} by {late * 1000:.0f} ms of {ttl * 1000:g}"


def slow_renewals(run: Controller, random: Random) -> str:
    """Many callers of one process pass one lease on, while each reply to it takes long; in the end none comes.

    So renewals are under way while the lease changes its section, and the lease runs out among its cohort.
    """
    name, (holder, others) = _name(run), _parts(run, random)
    slow = random.choice((0.005, 0.03, 0.1, 0.3))
    lasts, lines = 2.0, _lines(run, name)
    with ExitStack() as stack:
        for line in run.rig.lines:
            line.slow_down(holder.pid, slow, verb="renew", name=name)
            stack.callback(line.let_go)
        # Over a quorum no lease passes on: there a section itself lasts until its renewal.
        lasting = 0.6 * COHORT_TTL if run.settings.topology == "quorum" else 0.01
        crowd = PLAIN.but(names=(name,), ttl=COHORT_TTL, seconds=lasting, pause=0.0)
        run.order(holder, crowd, workers=8, seconds=lasts + COHORT_TTL + 1.0)
        _crowd(run, others, name, lasts + COHORT_TTL + 1.0, waiting=False)
        run.sleep(lasts)
        for line in run.rig.lines:
            line.mute(holder.pid)
        run.sleep(COHORT_TTL + random.uniform(0.1, 0.4))
        if 2 * sum(line.late > 0 for line in lines) <= len(lines):  # a member of a quorum may be down
            raise Absent("no reply to a renewal was late")
    run.sleep(AFTER)
    return f"{holder.name}, up to {slow * 1000:.0f} ms"


def _name(run: Controller) -> str:
    if SCENE not in run.settings.names:
        raise Absent("no lock in this history")
    return SCENE


def _lines(run: Controller, name: str) -> list[Line]:
    """The lines on which replies about this name must be late."""
    if not (lines := run.rig.lines_to(f"lock:{name}")):
        raise Absent("there is no proxy before the servers")
    return lines


def _style(random: Random) -> str:
    return random.choice(("with", "released", "entered"))


def _parts(run: Controller, random: Random) -> tuple[Worker, list[Worker]]:
    """A process that tests this version, with the longest ttl of all, and the other ones."""
    workers = run.running()
    holders = [each for each in workers if not each.version and run.settings.of(each.name) == run.settings]
    if len(workers) < 2 or not holders:
        raise Absent("too few processes")
    holder = random.choice(holders)
    return holder, [worker for worker in workers if worker is not holder]


def _hold(run: Controller, holder: Worker, turn: Turn, within: float = GRANT) -> float:
    """Let the process acquire once, and wait for the grant: when the process received it."""
    label = run.order(holder, turn)
    line = run.await_line(holder, "got", "h", f"{label}.0.", within)
    if line is None:
        raise Absent(f"{holder.name} did not get {turn.names[0]!r}")
    return float(line["t"])


def _crowd(run: Controller, workers: list[Worker], name: str, seconds: float, *, waiting: bool = True) -> None:
    """Let these processes acquire this lock again and again.

    Some wait for it; some try, since a waiter follows an unexpected end of a lease only at its next heartbeat, while
    any request that finds the lock free hands it over at once.
    """
    plain = PLAIN.but(names=(name,), ttl=0.6, style="with")
    for worker in workers:
        if waiting:
            run.order(worker, plain, seconds=seconds)
        run.order(worker, plain.but(timeout=0.0, pause=0.005), seconds=seconds)


KNOWN: Final = {
    "lost-grant": lost_grant, "stopped-holder": stopped_holder, "late-reply": late_reply,
    "slow-renewals": slow_renewals,
}  # fmt: skip
