"""The plain cases of lock.lua and permits.lua do what the verbs do, with every message and in every state.

Theory. Two servers get the same messages at the same times: one runs the script, the other runs the script without the
lines of the plain cases. After each message both have sent the same reply and the same pushes, and hold the same keys
with the same TTLs. The walk takes its messages by chance: holders and waiters of several clients, copies that arrive
twice or late, dead and unreachable waiters, revocations, takeovers by an owner, records that vanish, foreign keys, a
server without memory, a clock that is set back, another identity of the server, and clients of a quorum.
"""

from __future__ import annotations

import collections
import copy
import random
import re

import pytest

pytest.importorskip("lupa")

from interlock._protocol.server import ServerError
from interlock.primitives.codes import GRANTED, NOT_FOUND
from interlock.primitives.permits import ALL_PERMITS
from interlock.primitives.scripts import load
from model.script_model import able as able_server
from simulator import server
from simulator.commands import Hash

rule = pytest.mark.rule
able = pytest.fixture(autouse=True)(able_server)
PLAIN = "plain"  # the channel of counting()
LOCK, RECORD = b"k", b"{k}:record"
KEYS = {
    "lock": (LOCK, RECORD, b"{k}:queue", b"{k}:waiters", b"{k}:gone"),
    "permits": (LOCK, RECORD, b"{k}:queue", b"{k}:waiters", b"{k}:gone", b"{k}:shares"),
}
VOTER = b"{}{voter}"
REPLIDS = b"b" * 40, b"d" * 40  # of the same identities
FIRST, LAST = "-- The plain cases", "-- The queue of waiters."
IDENTITIES = "a" * 12 + ":" + "b" * 12, "c" * 12 + ":" + "d" * 12


def without_plain_cases(source):
    start, end = source.index(FIRST), source.index(LAST)
    assert source.count(FIRST) == source.count(LAST) == 1
    return source[:start] + source[end:]


def counting(source):
    """The script, which pushes a word to the channel PLAIN whenever a plain case makes the reply."""
    start, end = source.index(FIRST), source.index(LAST)
    lines = source[start:end].split("\n")
    for i, line in enumerate(lines):
        if line.strip().startswith("return {"):
            lines[i] = f"redis.pcall('PUBLISH', '{PLAIN}', '{i}') {line.strip()}"
    return source[:start] + "\n".join(lines) + source[end:]


class Pair:
    """Two servers under one clock."""

    def __init__(self, script, changed=str):
        self.clock = 0.0
        self.keys = KEYS[script]
        whole = load(script).source
        self.sources = [changed(counting(whole)), without_plain_cases(whole)]
        self.servers = [server.Server(lambda: self.clock) for _ in self.sources]
        self.change_replid(REPLIDS[0])
        self.pushes = [[], []]
        self.unheard = set()
        self.plain = collections.Counter()
        self.log = []
        for each, pushes in zip(self.servers, self.pushes, strict=True):
            each.publish = lambda channel, payload, pushes=pushes: pushes.append((channel, payload)) or 1
            each.subscribers = lambda channel: int(channel not in self.unheard)

    def say(self, *words, stamp):
        self.log.append((round(self.clock, 3), *words, stamp))
        args = [str(word).encode() for word in (*words, stamp)]
        for each in self.servers:
            each.copied = 0
        replies = [
            each.eval(source, [*self.keys, *([VOTER] if stamp[-1:] == "+" or stamp[25:26] == "+" else [])], list(args))
            for each, source in zip(self.servers, self.sources, strict=True)
        ]
        replies = [f"error {reply}" if isinstance(reply, ServerError) else reply for reply in replies]
        for channel, line in self.pushes[0]:
            if channel == PLAIN.encode():
                self.plain[line] += 1
        self.pushes[0][:] = [push for push in self.pushes[0] if push[0] != PLAIN.encode()]
        assert replies[0] == replies[1], self.told(replies)
        assert self.pushes[0] == self.pushes[1], self.told(self.pushes)
        for each in self.servers:
            each.purge_all()
        images = [each.image() for each in self.servers]
        assert images[0] == images[1], self.told(images)
        if words[0] == "acquire" and replies[0][0] == GRANTED:  # replicas have a write to acknowledge
            assert all(each.copied for each in self.servers), self.told([each.copied for each in self.servers])
        return replies[0]

    def told(self, both):
        return f"with plain cases {both[0]}\nwithout {both[1]}\nafter {self.log[-12:]}"

    def change_replid(self, replid, role=b"master"):
        text = b"# Replication\r\nrole:%s\r\nmaster_replid:%s\r\n" % (role, replid)
        for each in self.servers:
            each.info = lambda _section: text

    def change(self, key, value=None, ttl_ms=None):
        """Somebody else writes or deletes a key, in both servers."""
        for each in self.servers:
            each.read_clock()
            each.data.pop(key, None)
            each.expires.pop(key, None)
            if value is not None:
                each.data[key] = copy.copy(value)  # each server has its own
                if ttl_ms:
                    each.expires[key] = each.now_ms + ttl_ms


class Walk:
    """Messages by chance."""

    def __init__(self, script, seed, changed=str):
        self.random = random.Random(f"plain {seed}")
        self.script = script
        self.pair = Pair(script, changed)
        self.kind = self.random.choice((("semaphore", 2), ("semaphore", 8), ("rwlock", ALL_PERMITS)))
        self.tokens = []
        self.asked = {}
        self.sent = []
        self.identity, self.since = IDENTITIES[0], 0
        self.quorum = self.random.random() < 0.3 and script == "lock"
        self.none = self.random.random() < 0.2  # clients without a quarantine
        self.returned = not self.quorum and random.Random(seed).random() < 0.2  # it is the primary again

    def stamp(self):
        if self.quorum:
            if self.none and self.random.random() < 0.8:
                return "+"
            return f"{self.identity}+ {self.random.choice((2000,) * 20 + (4000,))}"
        if self.none and self.random.random() < 0.8:
            return ""
        previous = self.random.choice(("-", "-", "-", "?", IDENTITIES[0]))
        if previous == self.identity:
            previous = "-"
        if self.returned and self.random.random() < 0.8:
            previous = "@7"
            if self.random.random() < 0.02:
                self.since = int(self.pair.clock * 1000)
        mark = "*" if previous == "@7" else " "
        return f"{self.identity}{mark}{server.CLOCK_START // 1000 + self.since} 2000 0 {previous}"

    def say(self, *words):
        stamp = self.stamp()
        self.sent = [*self.sent[-40:], (words, stamp)]
        reply = self.pair.say(*words, stamp=stamp)
        if self.random.random() < 0.1:
            self.pair.say(*words, stamp=stamp)
        return reply

    def acquire(self, token):
        chance = self.random
        if token not in self.asked:
            channel = chance.choice(("c1", "c2", "{c3}", "-"))
            ttl = chance.choice((200, 5000, 30000, 30000, 30000, 200_000))
            bound = chance.choice(("inf",) * 8 + ("0", "2") if self.script == "lock" else ("inf", "2", "0", "0", "0"))
            self.asked[token] = (ttl, min(3000, ttl), int(channel != "-"), channel, bound, *self.own(token))
        return self.say("acquire", token, *self.asked[token])

    def own(self, token):
        """The arguments of this script alone."""
        chance = self.random
        if self.script == "lock":
            owner = token[:2] if chance.random() < 0.1 else ""
            return owner, chance.choice(("lock",) * 18 + ("election", "once"))
        kind, limit = self.kind
        if chance.random() < 0.1:
            kind, limit = chance.choice((("semaphore", 2), ("semaphore", 8), ("rwlock", limit)))
        permits = chance.choice((1, 1, limit))
        beside = self.holder() if kind == "rwlock" and chance.random() < 0.1 else ""
        return kind, permits, limit, beside

    def value(self):
        """The token of a holder, or the marker that holds the lock."""
        value = self.pair.servers[0].data.get(LOCK)
        if isinstance(value, dict):
            value = self.random.choice(sorted(value)) if value else b""
        return value.decode() if isinstance(value, bytes) else ""

    def holder(self):
        """The token of a holder, also of one that was revoked. No client ever has the text of another marker."""
        token = self.value().removeprefix("!")
        return token if token[1:2] == "/" else ""

    def run(self, episodes=12):
        for _ in range(episodes):
            self.calm_down()
            for _ in range(40):
                self.step()
        return self

    def calm_down(self):
        """A new episode: nothing disturbs the servers, and somebody may have emptied them."""
        chance, pair = self.random, self.pair
        for each in pair.servers:
            each.full, each.skew = False, 0.0
        if self.quorum:
            if b"role:slave" in pair.servers[0].info("replication"):
                pair.change_replid(chance.choice(REPLIDS))
            pair.clock += chance.choice((0.0, 5.0, 5.0))  # it no longer abstains
        pair.unheard = set()
        self.tokens = []
        if chance.random() < 0.7:
            for key in pair.keys:
                pair.change(key)

    def step(self):
        chance, pair = self.random, self.pair
        dice = chance.random()
        if dice < 0.3 or not self.tokens:
            token = f"{chance.choice('ab')}/{chance.randrange(10**9):09}"
            self.tokens = [*self.tokens[-8:], token]
            self.acquire(token)
        elif dice < 0.5:
            self.acquire(chance.choice((self.holder() or self.tokens[0], *self.tokens)) or self.tokens[0])
        elif dice < 0.8:
            token = self.holder() if chance.random() < 0.8 and self.holder() else chance.choice(self.tokens)
            self.say("release", token, chance.choice((0, 0, 0, 0, 5000)))
        elif dice < 0.87:
            alive = [token for token in self.tokens if chance.random() < 0.7] or self.tokens[:1]
            self.say("heartbeat", "c1", 1, *(word for token in alive for word in (token, 3000)))
        elif dice < 0.9:
            pair.clock += chance.choice((0.001, 0.001, 0.1, 1.0, 1.0, 4.0, 40.0, 400.0))
        elif dice < 0.93:
            words, stamp = chance.choice(self.sent)
            pair.say(*words, stamp=stamp)
        elif dice < 0.94:
            self.say("revoke", self.value() or "x", int(chance.random() < 0.5), "why")
        elif dice < 0.95:
            pair.unheard = {channel for channel in (b"c1", b"c2", b"{c3}") if chance.random() < 0.4}
        elif dice < 0.98:
            self.disturb()
        pair.clock += chance.choice((0.0, 0.001))  # a clock that stands still leaves a grant to the verbs

    def disturb(self):
        chance, pair = self.random, self.pair
        which = chance.choice((0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 7))
        if which == 0:
            pair.change(chance.choice((*pair.keys, *pair.keys[::5] * 2)))
        elif which == 1:
            value = self.value().encode() if self.script == "lock" else b""
            pair.change(LOCK, chance.choice((b"foreign", value)) or b"foreign", chance.choice((None, 500)))
        elif which == 2 and (record := pair.servers[0].data.get(RECORD)):
            ttl = pair.servers[0].expires[RECORD] - pair.servers[0].now_ms
            pair.change(RECORD, record + chance.choice((b" later", b" later !why", b" !why")), ttl)
        elif which == 3 and self.script == "lock":  # permits.lua writes before its grant, and so gets memory for it
            for each in pair.servers:
                each.full = not each.full
        elif which == 4:
            skew = chance.choice((0.0, -5.0, -0.5))
            for each in pair.servers:
                each.skew = skew
        elif which == 5:
            if not self.quorum:
                self.identity = chance.choice(IDENTITIES)
                self.since = int(pair.clock * 1000)
            elif chance.random() < 0.5:  # the client may learn that later, or never
                pair.change_replid(chance.choice(REPLIDS), chance.choice((b"master",) * 4 + (b"slave",)))
                self.identity = chance.choice(IDENTITIES)
            elif record := pair.servers[0].data.get(VOTER):
                pair.change(VOTER, chance.choice((None, b"2", record)), chance.choice((4_000_000_000, 6_000_000_000)))
        elif which == 6:
            pair.change(RECORD, b"2 lock 5 x", 5000)
        elif self.script == "lock" and (entries := pair.servers[0].data.get(pair.keys[3])):  # of an earlier version
            words = {token: entry.rsplit(b" ", 1)[0] for token, entry in entries.items()}
            earlier = chance.choice((b"", b" @5"))
            pair.change(pair.keys[3], Hash({token: entry + earlier for token, entry in words.items()}), 5000)


@rule(1, 4, 8, 9, 10)
@pytest.mark.parametrize("script", KEYS)
@pytest.mark.parametrize("seed", range(10))
def test_the_plain_cases_do_what_the_verbs_do(script, seed):
    Walk(script, seed).run()


@pytest.mark.parametrize(("script", "number"), [("lock", 5), ("permits", 2)])
def test_the_walks_meet_every_plain_case_often(script, number):
    plain = collections.Counter()
    for seed in range(10):
        plain.update(Walk(script, seed).run().pair.plain)
    cases = re.findall(rf"^redis.pcall\('PUBLISH', '{PLAIN}', '(\d+)'\)", counting(load(script).source), re.MULTILINE)
    assert len(cases) == number
    assert all(plain[case.encode()] > 20 for case in cases), plain


@pytest.mark.parametrize(
    ("script", "old", "new"),
    [
        ("lock", "if fence > stored_fence and fence <= now_us then\n", "if fence <= now_us then\n"),
        ("lock", "if fence > stored_fence and fence <= now_us then\n", "if fence > stored_fence then\n"),
        ("lock", "owner == '' and ", ""),
        ("lock", " and not call('ZSCORE', TOMBSTONES, token) then\n      local", " then\n      local"),
        ("lock", "tonumber(ttl) <= math.min(recorded_ttl, RECORD_TTL_MS / 2)", "true"),
        ("lock", "math.min(recorded_ttl, RECORD_TTL_MS / 2)", "RECORD_TTL_MS / 2"),
        ("lock", "if at_sign == '@' or ttl == '' then", "if ttl == '' then"),
        ("lock", "elseif not (has_queue_or_tombstones and call('ZSCORE', TOMBSTONES, 'ousted')) then", "else"),
        ("lock", "tonumber(alive_until) > now_us / 1000", "true"),
        ("lock", "if ARGV[3] == '0' and alive_until", "if alive_until"),
        ("lock", "if ARGV[3] ~= '0' then\n", "if false then\n"),
        ("lock", "or string.find(plain_record, ' ', holder_at + #token + 2, true) then", "then"),
        ("lock", "previous == '-' and 0 or nil", "0"),
        ("lock", "elseif pttl >= 0 and", "elseif"),
        ("lock", "is_plain = not HAS_RETURNED", "is_plain = true"),
        ("lock", "if is_plain and MARK == PLUS and (", "if false and ("),
        ("lock", "(verb == 'acquire' or has_queue_or_tombstones)", "verb == 'acquire'"),
        ("lock", "string.find(info, 'role:master\\r', 1, true)", "true"),
        ("lock", "string.find(info, '\\nmaster_replid:' .. replid .. '\\r', 1, true)", "true"),
        ("lock", "tonumber(longest) >= tonumber(string.sub(STAMP, MARK_AT + 2))", "true"),
        ("lock", "since + longest <= time[1] * 1000 + math.floor(time[2] / 1000)", "true"),
        ("lock", "\n    and call('PTTL', VOTER) > MIN_VOTER_TTL_MS", ""),
        ("lock", "if is_plain then IDENTITY = ", "if false then IDENTITY = "),
        ("lock", "IN_QUORUM and stored_fence and stored_fence > 0 ", "false "),
        ("lock", "stored_fence and stored_fence > 0 ", "stored_fence "),
        ("lock", "(IN_QUORUM or IDENTITY == '-') and '-' or string", "'-' or string"),
        ("lock", "== 1 and not call('ZSCORE', TOMBSTONES, token)", "== 1"),
        ("permits", "not HAS_RETURNED and", ""),
        ("permits", "  and call('EXISTS', QUEUE, TOMBSTONES) == 0 and", "  and"),
        ("permits", "if identity == IDENTITY and", "if"),
        ("permits", "not shares[1] ~= not first[1] or", "false or"),
        ("permits", "first[1] and tonumber(first[2]) <= now_us / 1000", "false"),
        ("permits", "plain_kind == ARGV[8] and", "true and"),
        ("permits", " and plain_limit == ARGV[10]", ""),
        ("permits", "and not call('ZSCORE', HOLDERS, token)", ""),
        ("permits", "if now_us > tonumber(stored_fence) and", "if"),
        ("permits", "tonumber(permits) <= plain_limit - (shares[1] or 0)", "true"),
        ("permits", "math.max(RECORD_TTL_MS + ttl, call('PTTL', RECORD))", "RECORD_TTL_MS + ttl"),
        ("permits", "math.max(ttl, call('PTTL', HOLDERS))", "ttl"),
        ("permits", "first[1] and math.max(ttl, stored_ttl) or ttl", "ttl"),
        ("permits", "first[1] and math.max(ttl, stored_ttl) or ttl", "math.max(ttl, stored_ttl)"),
    ],
)
def test_a_plain_case_that_ignores_a_state_is_caught(script, old, new):
    def changed(source):
        assert source.count(old) == 1, f"the script has changed: {old!r}"
        return source.replace(old, new)

    seed = 0
    with pytest.raises(AssertionError, match="without"):
        for seed in range(60):
            Walk(script, seed, changed).run()
    Walk(script, seed).run()  # it is the change that this walk has found


@rule(7, 9)
def test_the_record_outlives_a_long_lease_that_began_with_a_handover():
    pair, stamp = Pair("lock"), f"{IDENTITIES[0]} {server.CLOCK_START // 1000} 2000 0 -"
    long = ("acquire", "a/2", 1_000_000, 3000, 0, "-", "inf", "", "lock")
    pair.say("acquire", "a/1", 1000, 1000, 0, "-", "inf", "", "lock", stamp=stamp)
    pair.say(*long, stamp=stamp)
    pair.say("release", "a/1", 0, stamp=stamp)
    assert pair.say(*long, stamp=stamp)[0] == GRANTED
    ends = pair.servers[0].expires
    assert ends[RECORD] > ends[LOCK]


def recorded_ttl(pair) -> int:
    return int(pair.servers[0].data[RECORD].split()[4])


@rule(4, 10)
@pytest.mark.parametrize(
    "entry", [b"lock 30000", b"lock 30000 later", b"lock", b"lock @5", b"lock @5 later", b"lock later"]
)
def test_a_handover_goes_to_a_waiter_whose_entry_has_words_of_another_version(entry):
    """An earlier version stored no ttl, or `@<number>`, behind what its waiters want. The words of an entry stay."""
    pair, stamp = Pair("lock"), f"{IDENTITIES[0]} {server.CLOCK_START // 1000} 2000 0 -"
    acquire = (30000, 3000, 1, "c1", "inf", "", "lock")
    pair.say("acquire", "a/1", *acquire, stamp=stamp)
    pair.say("acquire", "a/2", *acquire, stamp=stamp)
    waiters = pair.keys[3]
    written = pair.servers[0].data[waiters][b"a/2"]
    assert written.endswith(b" 3000 1 c1 lock 30000")
    pair.change(waiters, Hash({b"a/2": written.removesuffix(b"lock 30000") + entry}), 5000)
    pair.say("heartbeat", "c1", 1, "a/2", 3000, stamp=stamp)
    assert pair.servers[0].data[waiters][b"a/2"].endswith(b" 3000 1 c1 " + entry)
    pair.clock += 0.001
    assert pair.say("release", "a/1", 0, stamp=stamp) == [1, 0]
    assert pair.pushes[0] == [(b"c1", b"granted a/2")]
    assert pair.servers[0].data[waiters][b"a/2"].endswith(b" 3000 0 c1 " + entry)
    says = [recorded_ttl(pair)]
    pair.say("acquire", "a/2", *acquire, stamp=stamp)
    assert [*says, recorded_ttl(pair)] == [30000 if entry.startswith(b"lock 3") else 3000, 30000]


@rule(8)
def test_a_holder_whose_share_the_server_has_evicted_gets_no_second_grant():
    pair, stamp = Pair("permits"), f"{IDENTITIES[0]} {server.CLOCK_START // 1000} 2000 0 -"
    for token, code in (("a/1", GRANTED), ("a/2", GRANTED), ("a/1", NOT_FOUND)):
        reply = pair.say("acquire", token, 30000, 3000, 0, "-", "inf", "semaphore", 1, 8, "", stamp=stamp)
        assert reply[0] == code
        if token == "a/1":
            pair.change(pair.keys[-1])  # the shares, and with them their sum; the next grant makes both anew
        pair.clock += 1.0
