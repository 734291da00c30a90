"""What must hold in a history: pure functions from its lines to violations.

Belief. A hold is believed from its first passing `ensure()` to its last one (times read before the calls), and nothing
is claimed about the rest of its life. So a verdict needs no knowledge of ttls, renewals or clocks of servers.

Who may hold together. Each hold has a weight, its name a limit, and holds of one `group` count as one (its heaviest):
an rlock's owner in several processes, a writer that goes on as a reader. At no time do the groups weigh more than the
limit. A lock has weight and limit 1; a semaphore its permits and its limit; a reader 1 and a writer the whole limit.

Writes. A section writes with its fence into a store beside (`store.py`), which refuses a lower fence than one that it
has accepted. So the store must refuse no current holder, and each write of an earlier holder after the current one's.

Order. A later grant has a higher fence. The lines show which of two leases is the later one: a caller asked for it
after the other one had been received; or it passed on inside a process (the same token, a higher fence), which happened
no earlier than the section before it began to end. A process that has received the later of two grants that cannot be
held together proves that the earlier lease was over: afterwards no `ensure()` of the earlier one may pass.

Versions. Processes of an older version are judged for what all versions must keep together: exclusion, order, writes.
The checks pass over how such a process reports losses, how long its calls take and which errors it raises. If it hangs
in the drain, nobody can tell whether the processes that hang beside it wait for what it holds.

What is excused: a client of a quorum may raise ConfigError while an address leads to a replica, or to another server of
the quorum, and shortly after. The checker does not believe in a lease from the moment on at which somebody revoked it
by force. In a history in which a server's clock was stepped, interlock promises no exclusion, but only the fences (D5).
If such a step has stretched the life of a lease in the server, nobody can tell when the waiters for that lease get on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from model.histories.lines import Line

SLACK: Final = 3.0  # seconds that a busy machine may take beyond what is promised
TRY: Final = 1.0  # seconds that one try may take: `try_for`
SOON: Final = 2.0  # seconds after which a holder that runs has heard of a loss
MACHINE: Final = "*"  # in place of a process: all of them stand still
MOST: Final = 5  # violations of one kind that are reported
CANCELLED: Final = "CancelledError"
CONFIG_ERROR: Final = "ConfigError"
BODY: Final = "BodyError"  # what bodies raise by themselves
EXPECTED: Final = frozenset({"", "AcquireTimeout", "Unavailable", "LeaseLost", CANCELLED, BODY})


class Write(NamedTuple):
    """What a hold wrote into the store."""

    since: float  # when the worker asked, and when it had the answer
    until: float
    accepted: bool


@dataclass
class Hold:
    """One lease, as its process saw it."""

    id: str
    process: str
    section: str
    name: str
    kind: str
    weight: int
    limit: int
    group: str
    asked: float
    timeout: float | None = None
    token: str = ""
    fence: int = 0
    no_fence: object = None
    """What the lease showed in place of a fence: then a caller has read the reply to another one's message."""
    got: float | None = None
    failed: float | None = None
    oks: list[float] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    lost: float | None = None
    untold: float | None = None
    letting: float | None = None
    how: str = ""
    let: float | None = None
    ours: bool | None = None
    error: str = ""
    callbacks: int = 0
    nested: list[Line] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass
class Section:
    """What one worker did from one acquire to its end."""

    id: str
    process: str
    begun: float
    style: str = ""
    cancels: list[float] = field(default_factory=list)
    ended: float | None = None
    outcome: str = ""
    cancelling: int = 0
    lines: list[Line] = field(default_factory=list)


@dataclass
class Violation:
    """A promise that was broken, and the lines that show it."""

    check: str
    text: str
    lines: list[Line]


@dataclass
class History:
    """What the lines say, by hold and section."""

    lines: list[Line]
    holds: dict[str, Hold] = field(default_factory=dict)
    sections: dict[str, Section] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)
    older: set[str] = field(default_factory=set)  # processes that run an older version
    pauses: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    revoked: list[Line] = field(default_factory=list)
    misled: list[tuple[float, float]] = field(default_factory=list)
    clock_stepped: bool = False
    older_hung: bool = False  # whether a process of an older version did not end after the drain
    stretched: bool = False  # whether a stepped clock has made a lease last longer than any ttl
    patience: float = 5.0  # seconds that a server may stay away before a call raises Unavailable

    @classmethod
    def of(cls, lines: Iterable[Line], *, clock_stepped: bool = False, patience: float = 5.0) -> History:
        history = cls(sorted(lines, key=lambda line: line["t"]), clock_stepped=clock_stepped, patience=patience)
        for line in history.lines:
            history._take(line)
        return history

    def _take(self, line: Line) -> None:
        event, t = line["e"], line["t"]
        if event == "ask":
            self.holds[line["h"]] = Hold(
                line["h"], line["p"], line["s"], line["name"], line["kind"], line["weight"], line["limit"],
                line["group"] or line["h"], t, line["timeout"],
            )  # fmt: skip
        elif event == "begin":
            self.sections[line["s"]] = Section(line["s"], line["p"], t, line["style"])
        elif event == "killed":
            self.killed[line["who"]] = t
        elif event == "paused":
            self.pauses[line["who"]].append((t, line["until"]))
        elif event == "revoked":
            self.revoked.append(line)
        elif event == "misled":
            self.misled.append((t, line["until"]))
        elif event == "hung" and line["who"] in self.older:
            self.older_hung = True
        elif event == "older":
            self.older.add(line["who"])
        elif event == "stretched":
            self.stretched = True
        if hold := self.holds.get(line.get("h", "")):
            hold.lines.append(line)
            self._of_hold(hold, event, t, line)
        elif section := self.sections.get(line.get("s", "")):
            section.lines.append(line)
            if event == "cancel":
                section.cancels.append(t)
            elif event == "end":
                section.ended, section.outcome, section.cancelling = t, line["outcome"], line["cancelling"]

    @staticmethod
    def _of_hold(hold: Hold, event: str, t: float, line: Line) -> None:
        if event == "got" and not isinstance(line["fence"], int):
            hold.no_fence = line["fence"]
        elif event == "got":
            hold.got, hold.token, hold.fence = t, line["token"], line["fence"]
        elif event == "failed":
            hold.failed = t
        elif event == "ok":
            hold.oks.append(t)
        elif event == "wrote":
            hold.writes.append(Write(t, line["until"], line["accepted"]))
        elif event == "lost":
            hold.lost = t if hold.lost is None else hold.lost
        elif event == "untold":
            hold.untold = t
        elif event == "nested":
            hold.nested.append(line)
        elif event == "on_lost":
            hold.callbacks += 1
        elif event == "letting":
            hold.letting, hold.how = t, line["how"]
        elif event == "let":
            hold.let, hold.ours, hold.error = t, line["ours"], line["error"]

    def by_name(self) -> dict[str, list[Hold]]:
        """The holds that were granted, by the name of the lock."""
        found: dict[str, list[Hold]] = defaultdict(list)
        for hold in self.holds.values():
            if hold.got is not None:
                found[hold.name].append(hold)
        return found

    def paused(self, process: str, since: float, until: float) -> float:
        """Seconds between these times for which the process, or the machine, stood still."""
        within = [
            (max(since, a), min(until, b))
            for who in (process, MACHINE)
            for a, b in self.pauses.get(who, ())
            if a < until and b > since
        ]
        total, reached = 0.0, since
        for a, b in sorted(within):  # they overlap: what several say counts once
            total += max(0.0, b - max(a, reached))
            reached = max(reached, b)
        return total

    def believed(self, hold: Hold) -> tuple[float, float] | None:
        """From when to when the hold was believed for certain; not after a revocation by force."""
        oks = hold.oks
        for line in self.revoked:
            if line["force"] and line["name"] == hold.name and self._may_be_revoked(hold, line["t"]):
                oks = [t for t in oks if t < line["since"]]
        return (oks[0], oks[-1]) if oks else None

    @property
    def excuses_hanging(self) -> bool:
        """Whether a caller that hangs may wait for a lease that stays too long through no fault of this version."""
        return self.stretched or self.older_hung

    def judged(self) -> list[Hold]:
        """The holds of this version, for what a version promises to its own callers."""
        return [hold for hold in self.holds.values() if hold.process not in self.older]

    def judged_sections(self) -> list[Section]:
        """The sections of this version."""
        return [section for section in self.sections.values() if section.process not in self.older]

    def was_misled(self, since: float, until: float) -> bool:
        """Whether a client may have found between these times that an address leads to a server that it must refuse."""
        return any(a < until and b > since - SLACK for a, b in self.misled)

    def was_forced(self, name: str, since: float, until: float) -> bool:
        """Whether somebody may have revoked a lease on this name by force between these times."""
        forced = (line for line in self.revoked if line["force"] and line["name"] == name)
        return any(line["since"] < until and line["t"] > since for line in forced)

    def _may_be_revoked(self, hold: Hold, done: float) -> bool:
        """Whether a revocation that was over at `done` may have met this hold: granted before, or heard of late."""
        got = hold.got or 0.0
        return hold.asked < done and (got < done or self.paused(hold.process, hold.asked, got) > 0)


# The checks


def overlaps(history: History) -> Iterator[Violation]:
    """Holds that are believed at one time never weigh more than the limit."""
    if history.clock_stepped:
        return
    for name, holds in history.by_name().items():
        spans = [(span, hold) for hold in holds if (span := history.believed(hold))]
        turns = sorted(
            [(span[0], 1, number) for number, (span, _) in enumerate(spans)]
            + [(span[1], 0, number) for number, (span, _) in enumerate(spans) if span[1] > span[0]]
        )
        inside: dict[int, Hold] = {}
        for when, begins, number in turns:
            span, hold = spans[number]
            if not begins:
                inside.pop(number, None)
                continue
            heaviest: Counter[str] = Counter()
            for other in (*inside.values(), hold):
                heaviest[other.group] = max(heaviest[other.group], other.weight)
            if heaviest.total() > hold.limit:
                others = [other for other in inside.values() if other.group != hold.group]
                yield Violation(
                    "overlap",
                    f"{name}: {hold.id} (fence {hold.fence}) was believed from {when:.6f} on, beside "
                    + ", ".join(f"{other.id} (fence {other.fence}, until {other.oks[-1]:.6f})" for other in others)
                    + f": together {heaviest.total()}, and {hold.limit} is the most",
                    _story(hold, *others),
                )
            if span[1] > span[0]:
                inside[number] = hold


def outlived(history: History) -> Iterator[Violation]:
    """Nobody believes in a lease after a later grant, beside which it cannot be held, was received."""
    if history.clock_stepped:
        return
    for name, holds in history.by_name().items():
        later: dict[int, list[Hold]] = {}  # weight -> the first two holds, of different groups, with a higher fence
        for hold in sorted(holds, key=lambda hold: -hold.fence):
            span = history.believed(hold)
            if span is not None:
                received = [
                    other
                    for weight, first in later.items()
                    if weight + hold.weight > hold.limit
                    for other in first
                    if other.group != hold.group and other.fence > hold.fence and _got(other) < span[1]
                ]
                if received:
                    other = min(received, key=_got)
                    text = (
                        f"{hold.id} (fence {hold.fence}) was believed at {span[1]:.6f}, after {other.id} had received"
                    )
                    text += f" the later fence {other.fence}"
                    yield Violation("outlived", f"{name}: {text}", _story(hold, other))
            _keep_first_two(later.setdefault(hold.weight, []), hold)


def _keep_first_two(first: list[Hold], hold: Hold) -> None:
    """Keep the holds that were received first: of each group one, and of all groups two."""
    for other in first:
        if other.group == hold.group:
            if _got(hold) < _got(other):
                first.remove(other)
                break
            return
    first.append(hold)
    first.sort(key=_got)
    del first[2:]


def fences(history: History) -> Iterator[Violation]:
    """A grant that came after another one has a higher fence; two grants never have the same one."""
    for hold in history.holds.values():
        if hold.no_fence is not None:
            yield Violation("fence", f"{hold.name}: {hold.id} has {hold.no_fence!r} in place of a fence", _story(hold))
    for name, holds in history.by_name().items():
        # The first hold of each lease, since an rlock can be entered again. Sections of a cohort share a token.
        grants: dict[tuple[str, int], Hold] = {}
        for hold in sorted(holds, key=_got):
            grants.setdefault((hold.token, hold.fence), hold)
        first: dict[int, Hold] = {}
        for hold in grants.values():
            if (other := first.setdefault(hold.fence, hold)) is not hold:
                text = f"{name}: {hold.id} and {other.id} have one fence {hold.fence}"
                yield Violation("fence", text, _story(hold, other))
        # A lease that a caller had before another lease began was granted before that one.
        begun = _begun(history, name, holds)
        before, highest = list(grants.values()), None
        for lease, hold in sorted(grants.items(), key=lambda item: begun[item[0]]):
            while before and _got(before[0]) < begun[lease]:
                other = before.pop(0)
                highest = other if highest is None or other.fence > highest.fence else highest
            if highest is not None and highest.fence > hold.fence:
                how = "it asked" if begun[lease] <= hold.asked else "its lease was passed on"
                text = f"{hold.id} has the fence {hold.fence}, though {highest.id} had {highest.fence} before {how}"
                yield Violation("fence", f"{name}: {text}", _story(highest, hold))


def _begun(history: History, name: str, holds: list[Hold]) -> dict[tuple[str, int], float]:
    """The time before which each lease, by token and fence, cannot have begun."""
    begun: dict[tuple[str, int], float] = {}
    ending: dict[tuple[str, int], float] = {}
    fences: dict[str, set[int]] = defaultdict(set)
    for hold in holds:
        lease = hold.token, hold.fence
        fences[hold.token].add(hold.fence)
        begun[lease] = min(hold.asked, begun.get(lease, hold.asked))
        if hold.letting is not None:
            ending[lease] = min(hold.letting, ending.get(lease, hold.letting))
    if history.clock_stepped:  # then a lease that passes on excludes nobody
        return begun
    for token, several in fences.items():
        ordered = sorted(several)
        for former, fence in pairwise(ordered):
            passed, asked = ending.get((token, former)), begun[token, former]
            if passed is not None and not history.was_forced(name, asked, passed):
                begun[token, fence] = max(begun[token, fence], passed)
    return begun


def _got(hold: Hold) -> float:
    return hold.got or 0.0


def writes(history: History) -> Iterator[Violation]:
    """The store refuses an earlier holder once a later one has written, and no holder that believes."""
    for name, holds in history.by_name().items():
        written = sorted(
            ((write, hold) for hold in holds for write in hold.writes if write.accepted), key=lambda each: each[0]
        )
        yield from _stale(name, written)
        if not history.clock_stepped:
            yield from _disturbed(history, name, holds, written)


def _stale(name: str, written: list[tuple[Write, Hold]]) -> Iterator[Violation]:
    before, highest = sorted(written, key=lambda each: each[0].until), None
    for write, hold in written:
        while before and before[0][0].until < write.since:
            other = before.pop(0)[1]
            highest = other if highest is None or other.fence > highest.fence else highest
        if highest is not None and highest.fence > hold.fence:
            text = f"{hold.id} wrote with the fence {hold.fence} after {highest.id} had written with {highest.fence}"
            yield Violation("stale write", f"{name}: {text}", _story(highest, hold))


def _disturbed(
    history: History, name: str, holds: list[Hold], written: list[tuple[Write, Hold]]
) -> Iterator[Violation]:
    """A holder that has written is refused, or another one writes, while that holder still believes."""
    for hold in holds:
        span = history.believed(hold)
        if span is None or not hold.writes:
            continue
        for write in hold.writes:
            if not write.accepted and write.until < span[1]:
                text = f"the store refused {hold.id} (fence {hold.fence}) at {write.until:.6f}, and it still believed"
                yield Violation("refused write", f"{name}: {text} at {span[1]:.6f}", _story(hold))
        first = min((write.until for write in hold.writes if write.accepted), default=span[1])
        for write, other in written[bisect_left(written, first, key=lambda each: each[0].since) :]:
            if write.since > span[1]:
                break
            if other.group != hold.group and write.until < span[1]:
                text = f"{other.id} (fence {other.fence}) wrote at {write.since:.6f}, while {hold.id} (fence"
                yield Violation("stale write", f"{name}: {text} {hold.fence}) believed", _story(hold, other))


def inherited(history: History) -> Iterator[Violation]:
    """A child of a fork holds nothing of what its parent holds."""
    for line in history.lines:
        if line["e"] == "inherited" and (line["passed"] or line["ours"] is not False):
            hold = history.holds[line["h"]]
            text = f"for the child {line['p']} the hold {hold.id} of its parent "
            text += "passed ensure()" if line["passed"] else f"was released: {line['error'] or line['ours']}"
            yield Violation("inherited", f"{hold.name}: {text}", _story(hold))


def nested(history: History) -> Iterator[Violation]:
    """A caller that enters an rlock once more has the same lease and fence, or a newer lease of its owner."""
    for hold in history.judged():
        for line in hold.nested:
            if hold.group.startswith("owner") and line["fence"] > hold.fence:
                continue
            if (line["token"], line["fence"]) != (hold.token, hold.fence):
                yield Violation("nested", f"{hold.name}: {hold.id} was entered again under another lease", _story(hold))


def told(history: History) -> Iterator[Violation]:
    """A lease that ended without a release is reported: the event, the callback (once), LeaseLost on leaving."""
    if history.clock_stepped:
        return
    for hold in history.judged():
        lost, untold = hold.lost, hold.untold
        if (
            lost is not None
            and untold is not None
            and untold - lost - history.paused(hold.process, lost, untold) > SOON
        ):
            text = f"the worker heard nothing for {untold - lost:.2f} s after ensure() had raised LeaseLost"
            yield Violation("untold", f"{hold.name}: {hold.id}: {text}", _story(hold))
        if hold.callbacks > 1:
            yield Violation(
                "told twice", f"{hold.name}: on_lost ran {hold.callbacks} times for {hold.id}", _story(hold)
            )
        # A loss may cancel the wait of a task for the one that leaves in its stead: see cancellations().
        section = history.sections.get(hold.section)
        is_cancelled = hold.error == CANCELLED and section is not None and section.style == "crossed"
        left = hold.lost is not None and hold.how == "with" and hold.let is not None
        if left and "LeaseLost" not in hold.error and not (is_cancelled and hold.callbacks):
            text = f"ensure() had raised LeaseLost, and leaving raised {hold.error or 'nothing'} without it"
            yield Violation("untold", f"{hold.name}: {hold.id}: {text}", _story(hold))


def releases(history: History) -> Iterator[Violation]:
    """A release that says "it was still ours" is right: nobody else had been granted the lock meanwhile."""
    if history.clock_stepped:
        return
    forced = {line["name"] for line in history.revoked if line["force"]}
    for name, holds in history.by_name().items():
        if name in forced or holds[0].limit != 1:
            continue
        for hold in holds:
            if hold.process in history.older:
                continue
            if hold.let is None or hold.letting is None or hold.error or hold.ours is False or hold.how == "drop":
                continue
            for other in holds:
                later = other.fence > hold.fence and other.group != hold.group
                if later and other.got is not None and other.got < hold.letting:
                    text = f"{hold.id} was let go as if it were held, though {other.id} had been granted the next one"
                    yield Violation("false release", f"{name}: {text}", _story(hold, other))
                    break


def cancellations(history: History) -> Iterator[Violation]:
    """Each cancellation that was asked for comes out, none else does, and `cancelling()` counts those only.

    While another task leaves a section in the stead of its task, a loss may cancel the task of the section, which waits
    for the other one: that cancellation is raised in a wait of the user's, outside of interlock.
    """
    told = {hold.section for hold in history.holds.values() if hold.callbacks or hold.lost is not None}
    for section in history.judged_sections():
        if section.ended is None:
            continue
        asked, bare = len(section.cancels), section.outcome == CANCELLED
        problem = ""
        if bare and not asked and section.style == "crossed" and section.id in told:
            if section.cancelling > 1:
                problem = f"was cancelled by its loss, and cancelling() is {section.cancelling} at its end"
        elif bare and not asked:
            problem = "ended with a CancelledError that nobody had asked for"
        elif asked and not bare and section.outcome != BODY:
            problem = f"was cancelled and ended with {section.outcome or 'no error'}"
        elif section.cancelling != asked:
            problem = f"was cancelled {asked} times, and cancelling() is {section.cancelling} at its end"
        if problem:
            yield Violation("cancellation", f"{section.id} {problem}", _around(history, section))


def liveness(history: History) -> Iterator[Violation]:
    """Each call ends within its time, and every section ends."""
    for hold in history.judged():
        done = hold.got if hold.got is not None else hold.failed
        if done is not None and hold.timeout is not None:
            bound = (hold.timeout or TRY) + SLACK
            took = done - hold.asked - history.paused(hold.process, hold.asked, done)
            if took > bound:
                text = f"acquire(timeout={hold.timeout:g}) took {took:.2f} s"
                yield Violation("slow", f"{hold.name}: {hold.id}: {text}", _story(hold))
        if hold.letting is not None and hold.let is not None:
            took = hold.let - hold.letting - history.paused(hold.process, hold.letting, hold.let)
            if took > history.patience + SLACK:
                yield Violation("slow", f"{hold.name}: {hold.id}: its release took {took:.2f} s", _story(hold))
    for section in history.judged_sections():
        if section.ended is None:
            if section.process not in history.killed and not history.excuses_hanging:
                yield Violation("hang", f"{section.id} began and never ended", _around(history, section))
        elif section.cancels:
            first = section.cancels[0]
            took = section.ended - first - history.paused(section.process, first, section.ended)
            if took > history.patience + SLACK:
                yield Violation(
                    "slow", f"{section.id} took {took:.2f} s to end after a cancel()", _around(history, section)
                )


def errors(history: History) -> Iterator[Violation]:
    """Nothing comes out of interlock but its own errors, and nothing goes wrong unseen."""
    for section in history.judged_sections():
        if section.ended is None or section.outcome in EXPECTED:
            continue
        if not (section.outcome == CONFIG_ERROR and history.was_misled(section.begun, section.ended)):
            yield Violation("error", f"{section.id} ended with {section.outcome}", _around(history, section))
    for line in history.lines:
        if line.get("who", line["p"]) in history.older:
            continue
        if line["e"] in {"logged", "unhandled", "died"}:
            yield Violation("error", f"{line.get('who', line['p'])} {line['e']}: {line['text']}", [line])
        if line["e"] == "hung" and not history.excuses_hanging:
            yield Violation("hang", f"{line['who']} did not end after the drain: {line['text']}", [line])


def leftovers(history: History) -> Iterator[Violation]:
    """After the drain a new client gets each name, and nothing is left in the servers but records with a TTL."""
    if history.stretched:
        return
    for line in history.lines:
        if line["e"] == "left":
            yield Violation("left", f"{line['key']} is left in the server: {line['about']}", [line])
        if line["e"] == "probe" and line["error"]:
            text = f"nobody holds it, and a new client waited {line['took']:.1f} s for it: {line['error']}"
            yield Violation("no progress", f"{line['name']}: {text}", [line])


CHECKS: Final[tuple[Callable[[History], Iterator[Violation]], ...]] = (
    overlaps, outlived, fences, writes, inherited, nested, told, releases, cancellations, liveness, errors, leftovers,
)  # fmt: skip


def check(history: History) -> list[Violation]:
    """All that is wrong: of each kind the first few."""
    found: list[Violation] = []
    seen: Counter[str] = Counter()
    for each in CHECKS:
        for violation in each(history):
            seen[violation.check] += 1
            if seen[violation.check] <= MOST:
                found.append(violation)
    return found


def _story(*holds: Hold) -> list[Line]:
    """The lines of these holds; of a row of passing `ensure()` its first and last."""
    lines: list[Line] = []
    for hold in holds:
        for before, line, after in zip([None, *hold.lines], hold.lines, [*hold.lines[1:], None], strict=False):
            if not (line["e"] == "ok" and before and after and before["e"] == after["e"] == "ok"):
                lines.append(line)
    return sorted(lines, key=lambda line: line["t"])


def _around(history: History, section: Section) -> list[Line]:
    """The lines of a section and of its holds."""
    holds = [hold for hold in history.holds.values() if hold.section == section.id]
    return sorted([*section.lines, *_story(*holds)], key=lambda line: line["t"])


def tally(history: History) -> Counter[str]:
    """What happened how often, for people."""
    counts: Counter[str] = Counter()
    for hold in history.holds.values():
        counts["asked"] += 1
        if hold.got is not None:
            counts["granted"] += 1
            counts[f"granted: {hold.kind}"] += 1
            counts["granted: to older versions"] += hold.process in history.older
            counts["ensure() passed"] += len(hold.oks)
            counts["writes"] += len(hold.writes)
            counts["writes refused"] += sum(not write.accepted for write in hold.writes)
        if hold.lost is not None:
            counts["losses seen"] += 1
        if "LeaseLost" in hold.error or hold.callbacks:
            counts["losses told"] += 1
    for section in history.sections.values():
        counts["cancellations"] += len(section.cancels)
    for line in history.lines:
        if line["e"] == "struck":
            counts[f"fault: {line['fault']}" + ", absent" * (not line["came"])] += 1
        if line["e"] == "played":
            counts[f"phase: {line['phase']}" + ", absent" * (not line["came"])] += 1
    return counts
