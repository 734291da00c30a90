"""The search for deadlocks, over what processes may say."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import pytest

from interlock.primitives.deadlocks import LATE, MIN_WAIT, find
from interlock.primitives.registry import Listed, Party


def party(caller: str, seconds: float = 10.0, **more) -> Party:
    fields = {
        "token": f"{caller}-{random.random()}", "fence": 1, "host": "h", "pid": 1, "label": "", "caller": caller,
        "place": f"{caller}.py:1", "seconds": seconds, "reported_ago": 0.5, "trace_id": "",
        "caller_id": f"h/1/{caller}", "limit": 1, "lasting": True,
    }  # fmt: skip
    return Party(**(fields | more))


def thing(name: str, holders, waiters, kind: str = "lock", **shares) -> Listed:
    """Holders and waiters are callers, or parties as they are."""

    def parties(those):
        return tuple(each if isinstance(each, Party) else party(each, **shares) for each in those)

    return Listed(kind, name, "lock:", parties(holders), parties(waiters))


def members(things, min_wait=MIN_WAIT):
    return [[each.waiter.caller for each in found.members] for found in find(things, min_wait)]


def ring(*callers, **changes):
    """Each caller holds the lock of its own name, and waits for that of the next one."""
    after = dict(zip(callers, [*callers[1:], callers[0]], strict=True))
    return [thing(each, [each], [before for before in callers if after[before] == each], **changes) for each in callers]


def test_two_that_wait_for_each_other():
    (found,) = find(ring("A", "B"))
    assert found.certain
    assert found.title == "A deadlock of 2 callers"
    assert [each.sentence() for each in found.beginning_with("h/1/B")] == [
        "h/1/B holds lock 'B' since B.py:1 and waits for lock 'A' at B.py:1",
        "h/1/A holds lock 'A' since A.py:1 and waits for lock 'B' at A.py:1",
    ]
    assert found.behind == 0
    assert found.seconds == 10


def test_no_text_of_others_reaches_a_terminal():
    things = ring("A\x1b[31m", "B\n")
    (found,) = find([Listed("lock\x1b[2J", *(each.name, each.prefix, each.holders, each.waiters)) for each in things])
    assert all(member.sentence().isprintable() for member in found.members)


def test_a_ring_in_the_order_of_its_waits():
    callers = [f"c{i}" for i in range(500)]
    ((first, *others),) = members(ring(*callers))
    start = callers.index(first)
    assert [first, *others] == callers[start:] + callers[:start]


def test_one_that_waits_for_itself():
    (found,) = find([thing("a", ["A"], ["A", "B"])])
    assert found.title == "A deadlock of one caller with itself"
    assert found.behind == 1


def test_several_deadlocks_and_those_behind_them():
    things = [*ring("A", "B"), *ring("C", "D", "E"), thing("x", ["A"], ["F"]), thing("y", ["F"], ["G"])]
    assert sorted(map(sorted, members(things))) == [["A", "B"], ["C", "D", "E"]]


@pytest.mark.parametrize(
    "things",
    [
        [],
        [thing("a", ["A"], ["B"]), thing("b", ["B"], ["C"])],  # A goes on
        [thing("a", ["A"], ["B"]), thing("b", ["B"], [])],
        [thing("a", ["A"], ["B"]), thing("b", [], ["A"])],  # nobody says that it holds b
        ring("A", "B", reported_ago=LATE + 0.1, seconds=60),  # dead, or stopped
        ring("A", "B", seconds=MIN_WAIT - 0.1),
        ring("A", "B", caller_id=""),  # nobody knows who they are
        ring("A", "B", limit=0),  # an entry that does not say how many permits there are
        # B waited when A's process wrote its entry, but began to hold b only later
        [thing("a", [party("A", reported_ago=5)], ["B"]), thing("b", [party("B", 4)], [party("A", reported_ago=5)])],
        # A waits for c by now: its older entry counts no more
        [*ring("A", "B"), thing("c", [], [party("A", 8, reported_ago=0.1)])],
    ],
)  # fmt: skip
def test_no_deadlock(things):
    assert members(things) == []


def test_a_short_wait_counts_if_the_caller_asks():
    assert len(members(ring("A", "B", seconds=1.0), 0.0)) == 1


def test_a_lease_that_may_end_otherwise_makes_it_probable():
    (found,) = find([thing("a", [party("A", lasting=False)], ["B"]), thing("b", ["B"], ["A"])])
    assert not found.certain
    assert found.title.startswith("Probably a deadlock")


def semaphore(holders, waiters, limit=2, **more):
    return thing("s", holders, waiters, "semaphore", limit=limit, **more)


@pytest.mark.parametrize(
    ("things", "found"),
    [
        ([semaphore(["A", "C"], ["B"]), thing("b", ["B"], ["A"])], []),  # C gives its permit back
        ([semaphore(["A"], ["B"]), thing("b", ["B"], ["A"])], []),  # so does a holder that nobody knows
        ([semaphore(["A", "C"], ["B"]), thing("b", ["B"], ["A", "C"])], [["A", "B", "C"]]),
        ([semaphore(["A"], [party("B", permits=2, limit=2)]), thing("b", ["B"], ["A"])], [["A", "B"]]),
        ([semaphore([party("A", permits=2, limit=2)], ["B"]), thing("b", ["B"], ["A"])], [["A", "B"]]),
        ([semaphore(["A", "A"], ["B"]), thing("b", ["B"], ["A"])], [["A", "B"]]),  # two leases of one caller
    ],
)
def test_a_semaphore_is_stuck_if_the_permits_of_stuck_holders_leave_too_few(things, found):
    assert [sorted(each) for each in members(things)] == found


def test_a_reader_behind_a_writer_that_waits_for_a_reader():
    def side(caller, permits, seconds=10.0):
        return party(caller, seconds, permits=permits, limit=9)

    things = [
        thing("x", [side("R1", 1)], [side("W", 9, 12), side("R2", 1)], "rwlock"),
        thing("b", ["R2"], ["R1"]),
    ]
    assert sorted(*members(things)) == ["R1", "R2", "W"]
    things[0] = thing("x", [side("R1", 1)], [side("R2", 1)], "rwlock")  # it only has not been woken yet
    assert members(things) == []


def test_words_of_others_are_escaped():
    (found,) = find([thing("a\x1b", [party("A\n", place="\x1b[2J")], ["A\n"])])
    assert all(each.sentence().isprintable() for each in found.members)


def stuck_by_trying(holds, waits, limits):
    """Who is never granted if all that can go on release all that they hold: by doing it, in any order."""
    holds, queues = {c: dict(h) for c, h in holds.items()}, {t: list(q) for t, q in waits.items()}
    changed = True
    while changed:
        changed = False
        waiting = {caller for queue in queues.values() for caller, _ in queue}
        for caller in [caller for caller in holds if caller not in waiting and holds[caller]]:
            holds[caller] = {}
            changed = True
        for name, queue in queues.items():
            taken = sum(held.get(name, 0) for held in holds.values())
            while queue and taken + queue[0][1] <= limits[name]:
                caller, permits = queue.pop(0)
                holds.setdefault(caller, {})[name] = permits
                taken += permits
                changed = True
    return {caller for queue in queues.values() for caller, _ in queue}


def test_those_that_are_found_never_go_on():
    """Random holders and waiters: what the search calls stuck is what stays when all others have done their work."""
    rng, with_deadlock = random.Random(1), 0
    for _ in range(1500):
        limits = {name: rng.choice((1, 1, 2, 3)) for name in "abcd"}
        holds: dict = defaultdict(dict)
        for name, limit in limits.items():
            free = limit
            while free and rng.random() < 0.8:
                caller, permits = rng.choice("ABCDEF"), rng.randint(1, free)
                if name not in holds[caller]:
                    holds[caller][name] = permits
                free -= permits
        waits: dict = defaultdict(list)
        for caller in rng.sample("ABCDEF", rng.randint(2, 6)):
            name = rng.choice("abcd")
            waits[name].append((caller, rng.randint(1, limits[name])))
        things = [
            Listed(
                "semaphore", name, "",
                tuple(party(c, permits=h[name], limit=limit) for c, h in holds.items() if name in h),
                tuple(party(c, 20 - i, permits=n, limit=limit) for i, (c, n) in enumerate(waits[name])),
            )
            for name, limit in limits.items()
        ]  # fmt: skip
        truth = stuck_by_trying(holds, waits, limits)
        found = {caller for each in members(things) for caller in each}
        assert found <= truth
        assert bool(found) == bool(truth)  # whoever is stuck stands in a deadlock, or behind one
        with_deadlock += bool(truth)
    assert 200 < with_deadlock < 1300


def test_ten_thousand_waiters_take_no_long_time():
    things = [thing("a", ["A"], [f"w{i}" for i in range(10_000)]), thing("b", ["B"], ["A"]), thing("c", [], ["B"])]
    started = time.process_time()
    assert members(things) == []
    (found,) = find([things[0], thing("b", ["B"], ["A"]), thing("w0", ["w0"], ["B"])])
    assert time.process_time() - started < 2
    assert found.behind == 9_999
