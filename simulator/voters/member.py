"""One member of the quorum: its data, its messages on their way, and what each event does to both.

A member is a value, and each step is computed once: the states of a search name members by number.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from .rules import (
    ATTACH,
    CLAIMED,
    CLOCK,
    EMPTY,
    END,
    EVICT,
    FLUSH,
    LAGGING,
    LONGEST,
    LOWER,
    MEMORY,
    NOTHING,
    OLDER,
    OWN,
    RESUME,
    SPARE,
    STAMP,
    UPTIME,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .rules import Bounds, Rule

ASKING, AGREEING, HOLDING, OVER = range(4)  # the phases of an attempt
NAMES: Final = "ABC"  # of clients
FENCES_PER_TICK: Final = 8  # by how much a clock that is taken for a fence moves in a tick
HANDOVER: Final = 1  # ticks for which a handover lasts until it is confirmed
FOREIGN: Final = -9  # the replid of another member, in a copy of that member's data
KNOWN_OTHER: Final = -8  # a client remembers another server, and will connect anew
GHOST = "a member gave a token back although its release had arrived there"

Token = tuple[int, int]  # client, attempt


class Voter(NamedTuple):
    """The voter record."""

    gen: int
    """The replid that it names: 0 is that of now, -1 the one before, and so on."""
    age: int
    """Ticks since `since`, by the member's clock; less than 0 if `since` is ahead of it."""
    longest: int
    """Ticks of the longest max_ttl seen."""


class Data(NamedTuple):
    """The keys of one lock, and the voter record."""

    voter: Voter | None = None
    token: Token | None = None
    left: int = 0
    """Ticks until the lock's key expires."""
    fence: int = 0
    """In the lock's record, relative to the clock of a member with no skew."""
    granted_by: int | None = None
    """The replid in the lock's record; None: there is no record, or the search needs none."""
    gone: tuple[Token, ...] = ()
    queue: tuple[Token, ...] = ()


class Exchange(NamedTuple):
    """One attempt of a client, as far as it concerns this member: messages on their way, and the answer."""

    attempt: int
    phase: int = ASKING
    ask: bool = True
    """Its acquire is on its way. So is one that was refused: the client asks again, under the same token."""
    answer: int | None = None
    """The answer to the question of this phase, if it counts: a fence while ASKING, else 1."""
    agree: int | None = None
    """Its agreed fence is on its way."""
    renew: bool = False
    lost: bool = False
    """To the renewal this member answered that it abstains and has lost the key."""
    regrant: tuple[int, bool, int] | None = None
    """A re-grant is on its way: for how many ticks, whether the abstention goes on that it names, and its fence."""
    release: bool = False
    freed: bool = False
    """The release has arrived."""


class Member(NamedTuple):
    """A member, and its exchanges with each client."""

    data: Data
    exchanges: tuple[tuple[Exchange, ...], ...]
    before: tuple[Data, ...] = ()
    """The data before its last writes, as a lagging replica has it, or a snapshot."""
    skew: int = 0
    is_replica: bool = False
    up: int = 0
    """Ticks since the process started, for rules that look at it."""
    stamps: tuple[int | None, ...] = ()
    """For each client, for rules that look at it: the replid that it read when it connected; None: not yet."""
    reach: int = -1
    """The clients that reach this member, as bits."""
    weight: int = 1
    """How many addresses lead to it."""

    def with_exchanges(self, client: int, exchanges: tuple[Exchange, ...]) -> Member:
        """Return the member with these exchanges with a client."""
        kept = (*self.exchanges[:client], exchanges, *self.exchanges[client + 1 :])
        return self._replace(exchanges=kept)


class Step(NamedTuple):
    """What an event at a member does."""

    text: str
    after: int
    late: int = 0
    """What it costs of `Bounds.late`."""
    client: int = -1
    """Whose message arrived."""
    broken: str = ""


class Members:
    """All members so far, by number."""

    def __init__(self, rule: Rule, bounds: Bounds) -> None:
        self.rule, self.bounds = rule, bounds
        self.has_stamps = rule.decides in (STAMP, MEMORY) or rule.fences_by == STAMP or rule.fast_path
        self.has_uptime = rule.decides == UPTIME
        self.has_records = bounds.fences or rule.fast_path
        self.most = max(*bounds.ttls, bounds.longest)
        self.all: list[Member] = []
        self._numbers: dict[Member, int] = {}
        for name in _CACHED:
            setattr(self, name, cache(getattr(self, name)))

    def number(self, member: Member) -> int:
        """Return the number of this member."""
        number = self._numbers.get(member)
        if number is None:
            number = self._numbers[member] = len(self.all)
            self.all.append(member)
        return number

    def first(self, skew: int) -> int:
        """Return a member that has served for long, and votes."""
        bounds = self.bounds
        voter = Voter(0, self.most, bounds.longest or max(bounds.ttls))
        data = Data(voter, fence=-FENCES_PER_TICK, granted_by=0) if bounds.used and self.has_records else Data(voter)
        if self.rule.decides in (MEMORY, UPTIME):
            data = data._replace(voter=None)
        clients = len(bounds.ttls)
        stamps = (0,) * (clients - 1) + (0 if self.rule.decides != MEMORY else None,) if self.has_stamps else ()
        up = self.most if self.has_uptime else 0
        return self.number(Member(data, ((),) * clients, skew=skew, up=up, stamps=stamps))

    # Who votes

    def _judge(self, at: Member, client: int, all_missing: bool) -> tuple[Voter | None, bool]:
        """Return the voter record after a request of this client, and whether the member votes."""
        rule, voter, own = self.rule, at.data.voter, self.bounds.ttls[client]
        if at.is_replica and rule.reads_role:
            return voter, False
        if (votes := self._judge_otherwise(at, client)) is not None:
            return voter, votes
        named = self._named(at, client)
        if voter is None:
            return Voter(named, 0, own), (all_missing and rule.all_missing_is_new) or not rule.missing_waits
        if voter.gen != named and rule.decides != NOTHING:
            longest = max(voter.longest, own) if rule.waits == LONGEST else own
            return Voter(named, 0, longest), not rule.other_waits
        longest = voter.longest if rule.waits == END else max(voter.longest, own)
        age = max(0, voter.age)  # a `since` ahead of the clock is written anew
        return Voter(voter.gen, age, longest), age >= (own if rule.waits == OWN else longest)

    def _judge_otherwise(self, at: Member, client: int) -> bool | None:
        """Return whether the member votes by a rule that does not look at the voter record; None by all others."""
        rule, data = self.rule, at.data
        if rule.decides == UPTIME:
            return at.up >= self.bounds.ttls[client]
        if rule.decides == MEMORY:
            return at.stamps[client] != KNOWN_OTHER
        if rule.fast_path and data.granted_by is not None and data.granted_by == self._stamp(at, client):
            return True
        return None

    def _stamp(self, at: Member, client: int) -> int:
        stamp = at.stamps[client]
        return 0 if stamp is None or stamp == KNOWN_OTHER else stamp

    def _named(self, at: Member, client: int) -> int:
        """The replid that the script takes for that of now."""
        return self._stamp(at, client) if self.rule.decides == STAMP else 0

    def _grant(self, at: Member, data: Data, client: int, token: Token, left: int) -> Data:
        """Grant the lock, with the fence that this member proposes."""
        if not self.has_records:
            return data._replace(token=token, left=left)
        named = self._stamp(at, client) if self.rule.fences_by == STAMP else self._named(at, client)
        if data.granted_by == named:
            fence = data.fence + 1
        else:
            clock = at.skew * FENCES_PER_TICK
            fence = clock if data.granted_by is None else max(data.fence + 1, clock)
        return data._replace(token=token, left=left, fence=fence if self.bounds.fences else 0, granted_by=named)

    # Messages that arrive

    def steps(self, number: int, all_missing: bool) -> list[Step]:
        """Return each arrival of a message at this member that changes something."""
        at, found = self.all[number], list[Step]()
        for client, exchanges in enumerate(at.exchanges):
            if at.reach >> client & 1:
                for index, exchange in enumerate(exchanges):
                    found += self._arrivals(at, client, index, exchange, all_missing)
        if at.is_replica:
            found.append(Step("is a primary again", self.number(_other_replid(at)._replace(is_replica=False))))
        return found

    def _arrivals(self, at: Member, client: int, index: int, exchange: Exchange, all_missing: bool) -> list[Step]:
        found = list[Step]()
        for text, data, after, late, broken in self._possible_arrivals(at, client, exchange, all_missing):
            if data != at.data or after != exchange:
                number = self.number(self._with(at, data, client, index, after))
                found.append(Step(f"gets {NAMES[client]}{exchange.attempt}'s {text}", number, late, client, broken))
        return found

    def _possible_arrivals(
        self, at: Member, client: int, exchange: Exchange, all_missing: bool
    ) -> Iterator[tuple[str, Data, Exchange, int, str]]:
        """Yield a text, the data and the exchange after it, what it costs of `Bounds.late`, and a broken promise."""
        is_over = exchange.phase == OVER
        if exchange.ask:
            data, fence = self._ask(at, client, exchange.attempt, all_missing)
            after = exchange
            if fence is not None:
                after = exchange._replace(ask=False, answer=fence if exchange.phase == ASKING else exchange.answer)
            yield f"acquire: {_say(data, fence)}", data, after, int(is_over), ""
            if fence is not None and self.bounds.late:
                yield "acquire, with a copy on its way: granted", data, after._replace(ask=True), is_over + 1, ""
        if exchange.renew:
            data, after, said = self._renew(at, client, exchange, all_missing)
            yield f"renewal: {said}", data, after, 0, ""
        if exchange.regrant is not None:
            data, said = self._regrant(at, client, exchange)
            broken = GHOST if exchange.freed and data.token != at.data.token else ""
            yield f"re-grant: {said}", data, exchange._replace(regrant=None), int(is_over), broken
        yield from self._rarer_arrivals(at, client, exchange, all_missing)

    def _rarer_arrivals(
        self, at: Member, client: int, exchange: Exchange, all_missing: bool
    ) -> Iterator[tuple[str, Data, Exchange, int, str]]:
        if exchange.agree is not None:
            data, stored = self._agree(at, client, exchange, all_missing)
            answer = 1 if stored and exchange.phase == AGREEING else exchange.answer
            yield "agreed fence", data, exchange._replace(agree=None, answer=answer), int(exchange.phase == OVER), ""
        if exchange.release:
            data = self._release(at, client, exchange, all_missing)
            yield "release", data, exchange._replace(release=False, freed=True), 0, ""
        if exchange.phase == ASKING and (client, exchange.attempt) in at.data.queue:
            yield "heartbeat: hands over", self._hand_over(at, at.data, client, all_missing), exchange, 0, ""

    def _ask(self, at: Member, client: int, attempt: int, all_missing: bool) -> tuple[Data, int | None]:
        """Return the data after an acquire, and the fence if the vote counts."""
        rule, data, token, ttl = self.rule, at.data, (client, attempt), self.bounds.ttls[client]
        if token in data.gone or (at.is_replica and rule.reads_role):
            return data, None
        voter, votes = self._judge(at, client, all_missing)
        data = data._replace(voter=voter)
        if data.token == token:
            if not votes and rule.checks_own_token:
                return data, None
            return _left_queue(data, token)._replace(left=max(data.left, ttl)), data.fence
        if data.token is None and data.queue and data.queue[0] != token:
            data = self._hand_over(at, data, client, all_missing)
        if data.token is None and votes:
            data = _left_queue(self._grant(at, data, client, token, ttl), token)
            return data, data.fence
        if self.bounds.waits and token not in data.queue:
            data = data._replace(queue=(*data.queue, token))
        return data, None

    def _hand_over(self, at: Member, data: Data, client: int, all_missing: bool) -> Data:
        if data.token is not None or not data.queue or (at.is_replica and self.rule.reads_role):
            return data
        voter, votes = self._judge(at, client, all_missing)
        data = data._replace(voter=voter)
        if not votes and self.rule.checks_handover:
            return data
        return self._grant(at, data, client, data.queue[0], HANDOVER)

    def _agree(self, at: Member, client: int, exchange: Exchange, all_missing: bool) -> tuple[Data, bool]:
        assert exchange.agree is not None
        data = at.data
        voter, votes = self._judge(at, client, all_missing)
        if data.token != (client, exchange.attempt) or not votes:
            return data, False
        return data._replace(voter=voter, fence=max(data.fence, exchange.agree)), True

    def _renew(self, at: Member, client: int, exchange: Exchange, all_missing: bool) -> tuple[Data, Exchange, str]:
        rule, data, token, ttl = self.rule, at.data, (client, exchange.attempt), self.bounds.ttls[client]
        voter, votes = self._judge(at, client, all_missing)
        if at.is_replica and rule.reads_role:
            return data, exchange, "refused"
        data = data._replace(voter=voter)
        counted = exchange._replace(renew=False, answer=1)
        if data.token == token:
            data = data._replace(left=max(data.left, ttl))
            if votes or not rule.renewals_need_a_vote:
                return data, counted, "renewed"
            return data, exchange, "lengthened, but it abstains"
        if rule.lost_comes_back and data.token is None and token not in data.gone:
            return self._grant(at, data, client, token, ttl), counted, "granted again"
        if rule.regrants and data.token is None and not votes:
            return data, exchange._replace(renew=False, lost=True), "lost, and it abstains"
        return data, exchange, "not found"

    def _regrant(self, at: Member, client: int, exchange: Exchange) -> tuple[Data, str]:
        """Return the data after a re-grant."""
        assert exchange.regrant is not None
        rule, data, token = self.rule, at.data, (client, exchange.attempt)
        left, is_bound, fence = exchange.regrant
        voter, votes = self._judge(at, client, False)
        if (
            votes
            or data.token is not None
            or (at.is_replica and rule.reads_role)
            or (rule.regrant_asks_gone and token in data.gone)
            or (rule.regrant_is_bound and not is_bound)
        ):
            return data, "refused"
        data = data._replace(voter=voter, token=token, left=left)
        if self.has_records:
            claims = rule.regrant_fence in (CLAIMED, LOWER)
            fence = fence - (rule.regrant_fence == LOWER)
            if data.granted_by is not None and rule.regrant_fence != LOWER:
                fence = max(fence, data.fence)
            data = data._replace(fence=fence, granted_by=0 if claims else FOREIGN)
        return data, "granted"

    def _release(self, at: Member, client: int, exchange: Exchange, all_missing: bool) -> Data:
        data, token = at.data, (client, exchange.attempt)
        if at.is_replica and self.rule.reads_role:
            return data
        doubtful = exchange.ask or (exchange.regrant is not None and self.rule.doubtful_regrant)
        if doubtful and token not in data.gone:
            data = data._replace(gone=tuple(sorted((*data.gone, token))))
        data = _left_queue(data, token)
        if data.token == token:
            data = self._hand_over(at, data._replace(token=None, left=0), client, all_missing)
        return data

    def _with(self, at: Member, data: Data, client: int, index: int, exchange: Exchange) -> Member:
        """Return the member with other data and another exchange."""
        before = (at.data, *at.before)[: self.bounds.tail] if data != at.data else at.before
        exchanges = at.exchanges[client]
        kept = (*exchanges[:index], exchange, *exchanges[index + 1 :])
        stamps = at.stamps
        if stamps and stamps[client] in (None, KNOWN_OTHER) and self.rule.decides != MEMORY:
            stamps = (*stamps[:client], 0, *stamps[client + 1 :])
        return self._tidy(at._replace(data=data, before=before, stamps=stamps).with_exchanges(client, kept))

    def _tidy(self, at: Member) -> Member:
        """Forget attempts that are over and have nothing on its way."""
        return at._replace(exchanges=tuple([tuple([e for e in each if _matters(e)]) for each in at.exchanges]))

    # Faults

    def faults(self, number: int) -> list[Step]:
        """Return each fault of this member alone that the bounds allow."""
        at = self.all[number]
        return [
            Step(text, self.number(self._tidy(after)))
            for kind, text, after in self._possible_faults(at)
            if kind in self.bounds.kinds and at.reach
        ]

    def _possible_faults(self, at: Member) -> Iterator[tuple[str, str, Member]]:
        empty = _restarted(at, Data())
        yield EMPTY, EMPTY, empty
        yield SPARE, SPARE, empty._replace(up=self.most if self.has_uptime else 0)
        yield FLUSH, FLUSH, _unbound(at._replace(data=Data()))
        yield ATTACH, ATTACH, _other_replid(at)
        yield CLOCK, CLOCK, at._replace(data=self._aged(at.data, 1, fences=False))
        if at.data.token is not None:
            yield EVICT, EVICT, at._replace(data=at.data._replace(token=None, left=0))
        for back, data in enumerate(at.before, 1):
            for kind, changed in ((OLDER, _restarted), (LAGGING, _other_data), (RESUME, _resumed)):
                yield kind, f"{kind} ({back} back)", changed(at, data)

    def copied(self, number: int, source: int, follows: bool) -> int:
        """Return the member with the data of another one; `follows`: it stays a replica."""
        at, there = self.all[number], self.all[source]
        data = self._aged(there.data, at.skew - there.skew, fences=False)
        if follows:  # it has the replid of its primary
            return self.number(_unbound(_other_replid(at)._replace(data=data, is_replica=True)))
        return self.number(_other_data(at, _foreign(data)))

    def emptied(self, number: int, restarts: bool) -> int:
        """Return the member without its data."""
        at = self.all[number]
        return self.number(self._tidy(_restarted(at, Data()) if restarts else _unbound(at._replace(data=Data()))))

    def split(self, number: int) -> tuple[int, int]:
        """Return the member as only A reaches it, and the empty one at its address."""
        at = self.all[number]
        asking = tuple([tuple([e._replace(ask=True, answer=None) for e in line[-1:]]) for line in at.exchanges])
        new = _restarted(at, Data())._replace(reach=2, exchanges=asking)
        return self.number(at._replace(reach=1)), self.number(new)

    def moved(self, number: int, source: int) -> tuple[int, int]:
        """Return the member that nobody reaches any more, and the one to which its address leads now."""
        at, there = self.all[number], self.all[source]
        gone = Member(Data(), ((),) * len(at.exchanges), reach=0)
        weight = there.weight if self.rule.counts_once else there.weight + 1
        return self.number(gone), self.number(there._replace(weight=weight))

    # Time

    def after_tick(self, number: int) -> int:
        """Return the member a tick later."""
        at = self.all[number]
        exchanges = at.exchanges
        if self.bounds.fences:
            exchanges = tuple([tuple([_exchange_aged(each) for each in line]) for line in exchanges])
        up = min(at.up + 1, self.most) if self.has_uptime else 0
        before = tuple([self._aged(each, 1) for each in at.before])
        return self.number(at._replace(data=self._aged(at.data, 1), exchanges=exchanges, before=before, up=up))

    def _aged(self, data: Data, ticks: int, *, fences: bool = True) -> Data:
        """Return the data as a clock sees them that is `ticks` later; `fences`: because time has passed."""
        voter = data.voter
        if voter is not None:
            voter = voter._replace(age=min(voter.age + ticks, self.most))
        if fences and self.bounds.fences and data.granted_by is not None:
            data = data._replace(fence=data.fence - ticks * FENCES_PER_TICK)
        left = data.left - ticks
        if data.token is not None and left <= 0:
            return data._replace(voter=voter, token=None, left=0)
        return data._replace(voter=voter, left=left if data.token is not None else 0)

    # What clients do, as far as it concerns one member

    def start(self, number: int, client: int, attempt: int) -> int:
        """A new attempt asks for the vote of this member."""
        at = self.all[number]
        return self.number(at.with_exchanges(client, (*at.exchanges[client], Exchange(attempt))))

    def ask(self, number: int, client: int, phase: int, fence: int, regrant_left: int) -> int:
        """Let the current attempt enter a phase, in which it asks something; `regrant_left`: see World._renewed."""
        at = self.all[number]
        exchanges = at.exchanges[client]
        if not exchanges or exchanges[-1].phase == OVER:
            return number
        each = exchanges[-1]
        regrant = (regrant_left, True, fence) if regrant_left and each.lost else each.regrant
        each = each._replace(
            phase=phase,
            answer=None,
            agree=fence if phase == AGREEING else None,
            renew=each.renew if regrant_left else phase == HOLDING,
            lost=False,
            regrant=regrant,
        )
        return self.number(at.with_exchanges(client, (*exchanges[:-1], each)))

    def hold(self, number: int, client: int) -> int:
        """Let the current attempt hold the lock: a late copy of its acquire is no longer a question."""
        at = self.all[number]
        exchanges = at.exchanges[client]
        if not exchanges or exchanges[-1].phase == OVER:
            return number
        each = exchanges[-1]._replace(phase=HOLDING, answer=None, agree=None, renew=False, lost=False)
        return self.number(at.with_exchanges(client, (*exchanges[:-1], each)))

    def end(self, number: int, client: int, releases: bool) -> int:
        """End the current attempt, with or without a release."""
        at = self.all[number]
        exchanges = at.exchanges[client]
        if not exchanges or exchanges[-1].phase == OVER:
            return number
        each = exchanges[-1]
        each = each._replace(phase=OVER, answer=None, agree=None, renew=False, lost=False, release=releases)
        return self.number(self._tidy(at.with_exchanges(client, (*exchanges[:-1], each))))

    # Looking at members

    def answer(self, number: int, client: int) -> int | None:
        """Return the answer to the current question of a client; None if there is none that counts."""
        exchanges = self.all[number].exchanges[client]
        return exchanges[-1].answer if exchanges and exchanges[-1].phase != OVER else None

    def has_regrant(self, number: int) -> bool:
        """Return whether a re-grant is on its way."""
        return any(each.regrant for line in self.all[number].exchanges for each in line)

    def is_asked_by_holder(self, number: int, client: int) -> bool:
        """Return whether the latest attempt of a client has held the lock, and has not released it."""
        exchanges = self.all[number].exchanges[client]
        return bool(exchanges) and exchanges[-1].phase == HOLDING

    def votes_after_quiet(self, number: int) -> bool:
        """Return whether this member votes for A, who is alone, asks, waits for max_ttl, and asks again."""
        for _ in range(self.most):
            number = self.after_tick(number)
        at = self.all[number]
        voter, _ = self._judge(at, 0, False)
        number = self.number(at._replace(data=at.data._replace(voter=voter)))
        for _ in range(self.most):
            number = self.after_tick(number)
        at = self.all[number]
        return at.data.token is None and self._judge(at, 0, False)[1]

    def with_clients_swapped(self, number: int) -> int:
        """Return the member with A and B swapped."""
        at = self.all[number]
        stamps, reach = at.stamps[::-1], at.reach if at.reach in (-1, 0) else 3 - at.reach
        data, before = _swapped(at.data), tuple([_swapped(each) for each in at.before])
        swapped = at._replace(data=data, before=before, exchanges=at.exchanges[::-1], stamps=stamps, reach=reach)
        return self.number(swapped)

    def without_past(self, number: int) -> int:
        """Return the member when no fault is left: nobody sees its earlier data any more."""
        return self.number(self.all[number]._replace(before=()))

    def without_late(self, number: int) -> int:
        """Return the member without messages of attempts that are over."""
        at = self.all[number]
        exchanges = tuple(
            [
                tuple([each._replace(ask=False, regrant=None) if each.phase == OVER else each for each in line])
                for line in at.exchanges
            ]
        )
        return self.number(self._tidy(at._replace(exchanges=exchanges)))


_CACHED: Final = (
    "steps", "faults", "copied", "emptied", "split", "moved", "after_tick", "start", "ask", "hold", "end", "answer",
    "has_regrant", "is_asked_by_holder", "with_clients_swapped", "without_past", "without_late",
)  # fmt: skip


def _matters(exchange: Exchange) -> bool:
    return exchange.phase != OVER or exchange.ask or exchange.release or exchange.regrant is not None


def _say(data: Data, fence: int | None) -> str:
    if fence is not None:
        return "granted" if not fence else f"granted, fence {fence}"
    return "refused" if data.token is None else "held"


def _left_queue(data: Data, token: Token) -> Data:
    return data._replace(queue=tuple([each for each in data.queue if each != token])) if data.queue else data


def _older(gen: int | None) -> int | None:
    return gen if gen is None or gen in (FOREIGN, KNOWN_OTHER) else gen - 1


def _with_older_replids(data: Data) -> Data:
    voter = data.voter and data.voter._replace(gen=_older(data.voter.gen) or 0)
    return data._replace(voter=voter, granted_by=_older(data.granted_by))


def _foreign(data: Data) -> Data:
    """Return a copy of the data of another member: that member's replids are nobody's here."""
    voter = data.voter and data.voter._replace(gen=FOREIGN)
    return data._replace(voter=voter, granted_by=None if data.granted_by is None else FOREIGN)


def _unbound(at: Member) -> Member:
    """Return the member after the end of an abstention: re-grants name an earlier one."""

    def unbound(each: Exchange) -> Exchange:
        regrant = each.regrant and (each.regrant[0], False, each.regrant[2])
        return each._replace(regrant=regrant, lost=False)

    return at._replace(exchanges=tuple([tuple([unbound(each) for each in line]) for line in at.exchanges]))


def _other_replid(at: Member) -> Member:
    """Return the member under a new replid, with the same data."""
    before = tuple([_with_older_replids(each) for each in at.before])
    stamps = tuple([_older(each) for each in at.stamps])
    return _unbound(at._replace(data=_with_older_replids(at.data), before=before, stamps=stamps))


def _other_data(at: Member, data: Data) -> Member:
    """Return the same process under a new replid, with other data. Its connections stay open."""
    changed = _other_replid(at._replace(data=data))
    return changed._replace(before=())


def _restarted(at: Member, data: Data) -> Member:
    """Return another process with these data: connections to the one before have ended."""
    stamps = tuple([None if each is None else KNOWN_OTHER for each in at.stamps])
    return _other_data(at, data)._replace(stamps=stamps, is_replica=False, up=0)


def _resumed(at: Member, data: Data) -> Member:
    return at._replace(data=data, before=())


def _exchange_aged(each: Exchange) -> Exchange:
    answer, agree, regrant = each.answer, each.agree, each.regrant
    if answer is not None and each.phase == ASKING:
        answer -= FENCES_PER_TICK
    if agree is not None:
        agree -= FENCES_PER_TICK
    if regrant is not None:
        regrant = (regrant[0], regrant[1], regrant[2] - FENCES_PER_TICK)
    return each._replace(answer=answer, agree=agree, regrant=regrant)


def _swapped(data: Data) -> Data:
    token = data.token and (1 - data.token[0], data.token[1])
    gone = tuple(sorted([(1 - client, attempt) for client, attempt in data.gone]))
    return data._replace(token=token, gone=gone, queue=tuple([(1 - c, attempt) for c, attempt in data.queue]))
