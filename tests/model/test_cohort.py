"""The local queue of a cohort, searched exhaustively: three callers, every order of what may happen to them.

`Cohorts` runs as it is, over a clock that the search moves and a book that allows every pass. The server is a counter
of fences. Only an event wakes a caller: so the search finds a wake-up that nobody gives.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from interlock._client import cohort as cohort_module
from interlock._client import cohorts as cohorts_module
from interlock._client.cohort import BUDGET, RESERVED_FOR, Turn
from interlock._client.cohorts import Cohorts
from interlock._client.grant import AcquireOptions, Attempt, Grant, Hold
from interlock.primitives.lock import lock_resource

rule = pytest.mark.rule

CALLERS = range(3)
KEY = "lock:a"
OPTIONS = AcquireOptions(30.0, joins=True)
RESERVED = 3  # instead of 64, so that the search uses them up


class Event:
    """Notes that its caller was woken."""

    def __init__(self):
        self.is_set = False

    def set(self):
        self.is_set = True


class Play:
    """A cohort and its callers after some steps. Each step checks what must hold."""

    def __init__(self):
        self.now = 1000.0
        self.fence = 0  # the newest fence in the record
        self.last_fence = 0  # of a section
        self.tokens = 0
        self.attempts = dict.fromkeys(CALLERS)
        self.turns = dict.fromkeys(CALLERS, "out")  # what each caller itself believes
        self.sections = {}  # by caller
        self.arrived = []  # those that wait, in order
        self.passes_since_others = None
        self.replied_at = 0.0  # when the server said last whether others wait
        runtime = SimpleNamespace(mutex=contextlib.nullcontext(), now=lambda: self.now, event=Event)
        keeper = SimpleNamespace(may_pass=lambda _: True, replace=lambda *_: None)
        self.cohorts = Cohorts(runtime, keeper, lambda _: None)

    @property
    def cohort(self):
        return self.cohorts.by_key.get(KEY)

    # What may happen

    def steps(self):
        found = [("later", BUDGET * 1.1), ("later", RESERVED_FOR * 1.1), ("looks",)] if self.cohort else []
        if self.cohort and self.now < 1000 + OPTIONS.ttl / 2:
            found.append(("later", OPTIONS.ttl * 0.55))
        for i in CALLERS:
            turn, attempt = self.turns[i], self.attempts[i]
            if turn == "out":
                found.append(("comes", i))
            elif turn == "waits" and attempt.event.is_set:
                found += [("wakes", i), ("gives_up", i)]
            elif turn == "waits":
                found.append(("gives_up", i))
            elif turn == "asks":
                found += [("granted", i), ("gives_up", i)]
            elif turn == "reserves":
                found += [("reserved", i, True), ("reserved", i, False), ("refused", i), ("gives_up", i)]
            elif turn == "inside":
                found += [("leaves", i), ("loses", i), ("asks_for_more", i), ("is_collected", i)]
        return found

    def later(self, seconds):
        self.now += seconds

    def comes(self, i):
        self.tokens += 1
        attempt = self.attempts[i] = Attempt(lock_resource("a", "lock:"), f"token {self.tokens}", OPTIONS)
        attempt.event = Event()
        if self.cohorts.join(attempt):
            self.turns[i] = "asks"
        else:
            self.turns[i] = "waits"
            self.arrived.append(i)

    def wakes(self, i):
        attempt = self.attempts[i]
        attempt.event.is_set = False
        turn = self.cohorts.turn(attempt)
        if turn is Turn.ASK:
            self._first(i)
            self.turns[i] = "asks"
        elif turn is not Turn.WAIT:
            self._first(i)
            self._begin(i, turn)

    def _first(self, i):
        assert self.arrived[0] == i, "a later caller went before"
        self.arrived.remove(i)

    def _begin(self, i, section):
        if section.fence == 0:
            self.turns[i] = "reserves"
            self.sections[i] = section
        elif section.reason_ended(self.now):
            self._instead(i, section)
        else:
            self._inside(i, section)

    def _instead(self, i, section):
        self.cohorts.drive_instead(section)
        self.sections.pop(i, None)
        assert self.cohorts.turn(self.attempts[i]) is Turn.ASK
        self.turns[i] = "asks"

    def _inside(self, i, section):
        assert "inside" not in self.turns.values(), "two callers are inside"
        assert self.last_fence < section.fence <= self.fence, "a fence that fell, or that nobody reserved"
        self.last_fence = section.fence
        self.sections[i] = section
        self.turns[i] = "inside"

    def granted(self, i):
        attempt = self.attempts[i]
        assert self.cohort.driver is attempt
        self.fence += 1
        section = held(attempt, self.fence, self.now)
        self.cohort.begin(section.hold)
        self.passes_since_others = None
        self._inside(i, section)

    def reserved(self, i, others_wait):
        section = self.sections[i]
        first, self.fence = self.fence + 1, self.fence + RESERVED
        section.hold.extend_deadline(self.now, 30.0, 0.0)
        self.cohorts.note_reserved_fences(section, first, sent=self.now, others_wait=others_wait)
        self.passes_since_others = (0, self.now) if others_wait else None
        self.replied_at = self.now
        self._inside(i, section)

    def refused(self, i):
        self._instead(i, self.sections[i])

    def asks_for_more(self, i):
        """An `execute` that gets no reply."""
        self.sections[i].hold.unanswered += 1

    def leaves(self, i):
        section = self.sections.pop(i)
        self.turns[i] = "out"
        may = section.hold.unanswered == 0
        if self.cohorts.pass_on(section, self.now):
            assert may, "it passed with an execute unanswered"
            assert section.hold.deadline - self.now >= OPTIONS.ttl / 2 - 1, "it passed late in its ttl"
            asks = self.cohort.section.fence == 0
            assert asks or self.now - self.replied_at <= RESERVED_FOR, "it passed, and the server's reply is old"
            self._check_budget()
            assert section.end_reason == Grant.RELEASED
            assert self.cohort.section.token == section.token
        else:
            section.mark_released()
            self.cohorts.end(section.hold)

    def _check_budget(self):
        if self.passes_since_others is not None:
            passes, since = self.passes_since_others
            assert passes + 1 < RESERVED, "too many sections while others wait"
            assert self.now - since < BUDGET, "too long while others wait"
            self.passes_since_others = passes + 1, since

    def is_collected(self, i):
        """A finalizer ends its lease, and tells nobody: the next look does."""
        self.sections.pop(i).end_reason = "it was dropped"
        self.turns[i] = "out"

    def looks(self):
        have_looked = [self.attempts[i] for i, turn in self.turns.items() if turn not in {"out", "waits"}]
        before = [attempt.event.is_set for attempt in have_looked]
        self.cohorts.look()
        assert [attempt.event.is_set for attempt in have_looked] == before, "it was woken, and had looked"

    def loses(self, i):
        section = self.sections.pop(i)
        section.end("its ttl passed")
        self.cohorts.end(section.hold)
        self.turns[i] = "out"

    def gives_up(self, i):
        attempt, drove = self.attempts[i], self.cohort.driver is self.attempts[i] and self.attempts[i].token
        attempt.abandoned = True
        passed = self.cohorts.leave(attempt)
        if passed is not None:
            assert passed.attempt is attempt
            passed.mark_released()
        assert self.sections.pop(i, passed) is passed
        self.turns[i] = "out"
        if i in self.arrived:
            self.arrived.remove(i)
        if drove and self.cohort:
            driver = self.cohort.driver
            assert driver is not None and driver.token == drove, "the place in the server's queue was given up"

    # What must hold

    def check(self):
        cohort = self.cohort
        if cohort is None:
            assert set(self.turns.values()) == {"out"}, "callers without a cohort"
            return
        if cohort.section is not None and cohort.section.end_reason == "it was dropped":
            return
        assert set(self.turns.values()) != {"out"}, "a cohort without callers"
        assert (cohort.driver is None) != (cohort.section is None), "a driver and a section, or neither"
        before = cohort.driver or cohort.section.attempt
        who = next(i for i in CALLERS if self.attempts[i] is before)
        assert self.turns[who] != "waits" or before.event.is_set, "its turn has come, and nobody woke it"
        tokens = [each.token for each in self.attempts.values() if each is not None and not each.abandoned]
        live = [self.attempts[i].token for i in CALLERS if self.turns[i] != "out"]
        assert len(live) == len(set(live)), "two callers have one token"
        assert before.token in tokens
        for attempt in cohort.waiting:
            assert not attempt.abandoned, "it waits for nobody"

    def state(self):
        """What tells two plays apart, without clocks, tokens and the size of fences."""
        cohort = self.cohort
        index = {id(attempt): i for i, attempt in self.attempts.items()}
        inner = cohort and (
            cohort.driver and index[id(cohort.driver)],
            cohort.section and (index[id(cohort.section.attempt)], cohort.section.hold.unanswered > 0),
            tuple(index[id(attempt)] for attempt in cohort.waiting),
            (hold := cohort.reservation)
            and (hold._left, self.now - hold._asked_at > RESERVED_FOR, self.now >= hold._passes_until),
        )
        turns = tuple((turn, turn == "waits" and self.attempts[i].event.is_set) for i, turn in self.turns.items())
        return inner, turns, self.passes_since_others and (
            self.passes_since_others[0], self.now - self.passes_since_others[1] >= BUDGET
        ), [section.hold.deadline - self.now >= OPTIONS.ttl / 2 for section in self.sections.values()]  # fmt: skip


def held(attempt, fence, now):
    """The grant of a lease that the server has just granted."""
    hold = Hold(attempt, attempt.token, now, now + 29.0)
    hold.grant = Grant(hold, attempt, fence, now)
    return hold.grant


def played(steps):
    play = Play()
    for name, *args in steps:
        getattr(play, name)(*args)
    return play


def search(limit=50_000):
    """Take every step in every state. Returns how many states there are, or raises what does not hold somewhere."""
    seen, paths = set(), [()]
    while paths and len(seen) < limit:
        path = paths.pop(0)
        for step in played(path).steps():
            steps = (*path, step)
            try:
                play = played(steps)
                play.check()
            except AssertionError as error:
                raise AssertionError(f"{error}, after {steps}") from error
            if (state := repr(play.state())) not in seen:
                seen.add(state)
                paths.append(steps)
    return len(seen)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(cohort_module, "RESERVED", RESERVED)


@rule(2)
def test_every_order_of_three_callers_keeps_the_rules():
    assert 1_000 < search() < 50_000


@rule(2)
def test_a_lease_that_ends_while_it_begins_leaves_nobody_without_a_cohort():
    """The driver stands still between the last two lines of `begin`, and its lease ends meanwhile."""
    play = played([("comes", 0), ("comes", 1)])
    cohort = play.cohort
    driver = cohort.driver
    section = held(driver, 1, play.now)
    cohort.hold = section.hold
    section.end("its ttl passed")
    play.cohorts.end(section.hold)
    cohort.driver = None
    assert play.cohort is cohort
    play.cohorts.look()
    assert cohort.driver is play.attempts[1]
    assert play.attempts[1].event.is_set


BUGS = {
    "a pass late in the ttl": ("hold.deadline - now >= hold.ttl / 2", "True", "late in its ttl"),
    "a pass with an execute unanswered": ("hold.unanswered == 0", "True", "an execute unanswered"),
    "a fence that nobody reserved": ("self._left == 0 or", "self._next == 0 or", "nobody reserved"),
    "an old reply": ("or now - self._asked_at > RESERVED_FOR", "", "reply is old"),
    "no end while others wait": ("(now < self._passes_until and", "(", "too long while others wait"),
    "a reservation more while others wait": (
        "now < self._passes_until and self._left > 0", "now < self._passes_until", "too many sections",
    ),
    "a place that is given up": ("first.go_on_for(former)", "pass", "queue was given up"),
    "a driver that nobody follows": (
        "driver = self.promote(now)\n        if self.driver", "driver = None\n        if self.driver",
        "queue was given up",
    ),
    "a wake-up lost to a cancellation": (
        "is not None and grant.attempt is attempt:\n            self.hold = None",
        "is None:\n            pass",
        "without callers",
    ),
    "the last is first": (
        "for first in list(self.waiting)", "for first in reversed(list(self.waiting))", "later caller",
    ),
    "an end that wakes nobody": (
        "return first\n        return None", "return None\n        return None", "nobody woke it",
    ),
}  # fmt: skip


@rule(2)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_in_the_cohort_is_found(bug, monkeypatch):
    old, new, found = BUGS[bug]
    source = Path(cohort_module.__file__).read_text()
    assert source.count(old) == 1
    planted = dict(vars(cohort_module))
    exec(compile(source.replace(old, new), cohort_module.__file__, "exec"), planted)
    planted |= {"RESERVED": RESERVED, "Turn": Turn}
    monkeypatch.setattr(cohorts_module, "Cohort", planted["Cohort"])
    with pytest.raises(AssertionError, match=found):
        search()
