"""One server of a quorum that abstains: what the real lock.lua answers, message by message (voter.lua, ADR 60)."""

import pytest

pytest.importorskip("lupa")

from interlock._quarantine.voter import VoterRecord
from interlock.primitives import scripts
from interlock.primitives.codes import ABSTAINS, GRANTED, NOT_FOUND, QUEUED
from simulator.server import CLOCK_START, Server

MAX_TTL = 1000  # ms
KEYS = (b"lock", b"record", b"queue", b"waiters", b"gone")
VOTER = b"voter"
FENCE = CLOCK_START + 10**12  # far ahead of the clock


class Member:
    """A server of a quorum that has served for long."""

    def __init__(self):
        self.seconds, self.replid = 0.0, "a" * 40
        self.server = Server(lambda: self.seconds)
        self.server.info = lambda _section: f"role:master\r\nmaster_replid:{self.replid}\r\n".encode()
        self.ask(b"voter")
        self.seconds += MAX_TTL / 1000

    def ask(self, verb, *words, max_ttl=MAX_TTL):
        keys = () if verb == b"voter" else KEYS[:2] if verb == b"renew" else KEYS
        stamp = b"process00000:replid000000+ %d" % max_ttl
        return self.server.eval(scripts.load("lock").source, (*keys, VOTER), (verb, *words, stamp))

    def acquire(self, token):
        return self.ask(b"acquire", token, b"1000", b"500", b"0", b"-", b"inf", b"", b"lock")

    def regrant(self, token, fence=FENCE):
        abstention = b"%s %d" % (self.replid.encode(), self.record.since_ms)
        return self.ask(b"regrant", token, b"900", b"%d" % fence, abstention, b"lock", b"-")

    def empty(self):
        self.server.data.clear()
        self.server.expires.clear()
        self.ask(b"voter")

    @property
    def holder(self):
        return self.server.data.get(b"lock", b"")

    @property
    def record(self):
        return VoterRecord.parse(self.server.data[VOTER].decode())


@pytest.fixture
def member():
    return Member()


@pytest.mark.rule(10)
def test_it_confirms_no_renewal_and_accepts_no_fence(member):
    assert member.acquire(b"A")[0] == GRANTED
    assert member.ask(b"renew", b"A", b"1000") == [GRANTED]
    member.replid = "b" * 40  # it was restarted with its data
    assert member.ask(b"renew", b"A", b"1000") == [[ABSTAINS, b""]]
    assert member.ask(b"fence", b"A", b"%d" % FENCE) == [NOT_FOUND]
    assert member.holder == b"A"
    member.seconds += 0.9
    assert member.ask(b"renew", b"A", b"1000") == [[ABSTAINS, b""]]  # and keeps the lease alive
    member.seconds += 0.2
    assert member.ask(b"renew", b"A", b"1000") == [GRANTED]
    assert member.ask(b"fence", b"A", b"%d" % FENCE) == [GRANTED]


@pytest.mark.rule(10)
def test_it_gives_no_vote_for_a_token_that_a_copy_has_brought(member):
    assert member.acquire(b"A")[0] == GRANTED
    member.replid = "b" * 40
    code, holder, *_ = member.acquire(b"A")
    assert (code, holder.partition(b">")[0]) == (QUEUED, b"!quarantine:@?")


@pytest.mark.rule(10)
@pytest.mark.parametrize("verb", ["release", "heartbeat", "revoke"])
def test_it_hands_over_to_nobody(member, verb):
    member.acquire(b"A")
    assert member.acquire(b"B")[0] == QUEUED
    member.replid = "b" * 40
    if verb == "release":
        member.ask(b"release", b"A", b"0")
    elif verb == "revoke":
        member.ask(b"revoke", b"A", b"1", b"why")
    else:
        member.seconds += 1.1
        member.ask(b"heartbeat", b"-", b"0", b"B", b"500")
    assert member.holder != b"B"
    member.seconds += 1.1
    member.ask(b"heartbeat", b"-", b"0", b"B", b"500")
    assert member.holder == b"B"


@pytest.mark.rule(10)
def test_the_longest_max_ttl_counts_whoever_asks(member):
    member.ask(b"voter", max_ttl=5000)
    member.replid = "b" * 40
    assert member.ask(b"voter") == [5000]
    member.seconds += 3
    assert member.ask(b"voter") == [2000]
    assert member.ask(b"voter", max_ttl=7000) == [4000], "it counts from the beginning of the abstention"


@pytest.mark.rule(7, 10)
def test_a_regrant_keeps_the_fence_and_is_not_its_own_grant(member):
    member.empty()
    assert member.regrant(b"A") == [GRANTED]
    assert member.server.data[b"record"].split()[2:4] == [b"%d" % FENCE, b"-"]
    assert member.regrant(b"A", FENCE - 5) == [GRANTED]
    assert int(member.server.data[b"record"].split()[2]) == FENCE


@pytest.mark.rule(10)
def test_a_regrant_is_refused_after_the_release_and_where_another_token_is(member):
    member.empty()
    member.ask(b"release", b"A", b"60000")
    assert member.regrant(b"A") == [NOT_FOUND]
    assert member.regrant(b"B") == [GRANTED]
    assert member.regrant(b"C") == [NOT_FOUND]
    assert member.holder == b"B"


@pytest.mark.rule(10)
def test_only_the_abstention_that_a_regrant_names_accepts_it(member):
    member.empty()
    late = b"%s %d" % (member.replid.encode(), member.record.since_ms)
    member.seconds += 0.01
    member.empty()
    assert member.ask(b"regrant", b"A", b"900", b"%d" % FENCE, late, b"lock", b"-") == [NOT_FOUND]
    member.seconds += 1.1  # and after the end of the abstention nobody is granted anything again
    assert member.regrant(b"A") == [NOT_FOUND]


@pytest.mark.rule(7, 10)
@pytest.mark.parametrize("verb", ["acquire", "regrant"])
def test_a_vote_for_a_token_that_was_granted_before_a_loss_proposes_a_fence_past_the_clock(member, verb):
    """The server may have forgotten fences, so it must not answer with the fence that a copy has brought."""
    if verb == "acquire":
        fence = member.acquire(b"A")[1]
        member.replid = "b" * 40
    else:
        member.empty()
        fence = FENCE - 10**12 - 10**6
        member.regrant(b"A", fence)
    for _ in range(3):
        member.ask(b"renew", b"A", b"1000")
        member.seconds += 0.5
    code, proposed = member.acquire(b"A")
    assert code == GRANTED
    assert proposed > fence
    assert member.acquire(b"A")[1] == proposed, "it gives the same answer when asked again"
