"""The real core and the real Lua under every kind of fault, on a virtual clock. See docs/simulator.md.

No test here needs what another one did: shares of the seeds may run anywhere, in any order.
"""

import ast
import contextlib
import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("lupa")

from harness.headers import Header
from harness.modes import wait_until
from interlock import aio
from interlock._client import acquiring as _core
from interlock._client import book as _book
from interlock._client import cohort as _cohort
from interlock._client import cohorts as _cohorts
from interlock._client import holding as _holding
from interlock._client import multi as multi_client
from interlock._client import reentrancy
from interlock._client import renewal as _renewal
from interlock._client import retries as _requests
from interlock._client import undo as _undo
from interlock._client import waiting as _waiters
from interlock._client import worker as _worker
from interlock._protocol.timing import FOREVER
from interlock.errors import Unavailable
from interlock.primitives.barrier import barrier_resource
from interlock.primitives.codes import GRANTED
from interlock.primitives.election import election_resource
from interlock.primitives.latch import latch_resource
from interlock.primitives.lock import lock_resource
from interlock.primitives.multi import multi_resource
from interlock.primitives.once import once_resource
from interlock.primitives.permits import ALL_PERMITS, permits_resource
from model.mutations import catch as caught
from model.mutations import counts_from_the_reply, never, replaced, shares
from simulator import (
    CROWDS,
    EVERY,
    PROFILES,
    RELAXED,
    SIDE_BY_SIDE,
    SUBJECTS,
    Plan,
    batch,
    cli,
    profile_of,
    shrink,
    simulate,
    subject_of,
)
from simulator.coroutines import Task
from simulator.profiles import ALL
from simulator.server import Server
from simulator.subjects import choices_of, subjects_of

SEEDS = 50  # and all of them with --full:
ALL_SEEDS = 2000
SHARE = 50


@pytest.mark.rule(1, 3, 4, 6, 7, 8, 9)
@pytest.mark.parametrize("first", shares(SEEDS, SHARE, ALL_SEEDS))
def test_no_rule_is_broken(first):
    interleavings = set()
    for seed in range(first, first + SHARE):
        report = simulate(seed)
        assert not report.violations, f"scripts/simulate --seed {seed} --shrink: {report.violations[:3]}"
        interleavings.add(report.interleaving)
    assert len(interleavings) == SHARE


def test_the_seeds_are_dealt_out_to_all_subjects_and_profiles():
    """The lock has the largest share, and the same seeds whatever subjects join."""
    runs = Counter((subject_of(seed), profile_of(seed).name) for seed in range(1000))
    assert runs.keys() == {(subject, profile) for subject in SUBJECTS for profile in PROFILES}
    assert min(runs.values()) >= 5
    of = Counter(subject_of(seed) for seed in range(1000))
    assert of["lock"] == max(of.values())
    assert [subject_of(seed) == "lock" for seed in range(0, 1000, len(PROFILES))][:5] == [0, 1, 0, 1, 0]


@pytest.mark.rule(7)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("profile", RELAXED)
def test_what_holds_without_the_server_s_promise(profile, subject):
    counts = Counter()
    for seed in range(2):
        report = simulate(seed, profile, subject=subject)
        again = f'scripts/simulate --seed {seed} --subject {subject} --profile "{profile}"'
        assert not report.violations, f"{again}: {report.violations[:3]}"
        counts += report.counts
    assert counts["flush all"] + counts["clock step"] > 3


@pytest.mark.rule(1, 2, 7)
@pytest.mark.parametrize("subject", ["lock", "rlock"])
@pytest.mark.parametrize("profile", CROWDS)
def test_callers_of_one_process_pass_leases_on(profile, subject):
    passed = 0
    for seed in range(2 if subject == "lock" else 1):
        report = simulate(seed, profile, subject=subject)
        again = f'scripts/simulate --seed {seed} --subject {subject} --profile "{profile}"'
        assert not report.violations, f"{again}: {report.violations[:3]}"
        passed += sum(" holds " in line for line in report.lines) - report.grants
    assert passed > 0 or subject == "rlock" or "slow" in profile or "empty" in profile


IN_COHORTS = {
    "fences that nobody reserves": ("lua", "fence = first_fence + number - 1", "fence = first_fence", 2, "no faults"),
    "a reservation that shortens": ("lua", "math.max(ttl, call('PTTL', LOCK))", "100", 1, "no faults"),
    "a driver that nobody follows": (
        "python",
        "driver = self.promote(now)\n        if self.driver",
        "driver = None\n        if self.driver",
        4,
        "cancel",
    ),
}


@pytest.mark.parametrize("bug", IN_COHORTS)
def test_a_planted_bug_in_the_cohorts_is_caught(bug, monkeypatch):
    where, old, new, rule, profile = IN_COHORTS[bug]
    lua = str
    if where == "lua":
        lua = replaced(old, new)
    else:
        source = Path(_cohort.__file__).read_text()
        assert source.count(old) == 1
        planted = dict(vars(_cohort))
        exec(compile(source.replace(old, new), _cohort.__file__, "exec"), planted)
        planted["Turn"] = _cohort.Turn
        monkeypatch.setattr(_cohorts, "Cohort", planted["Cohort"])
    assert any(
        violation.rule == rule
        for seed in range(60)
        for violation in simulate(seed, f"crowd, {profile}", subject="lock", lua=lua).violations
    )


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("profile", SIDE_BY_SIDE)
def test_what_a_later_version_stores_besides_disturbs_nobody(profile, subject):
    if SIDE_BY_SIDE[profile].changes_primary and subject in {"latch", "barrier"}:
        return  # they hold no leases, which are what a change of servers is about
    for seed in range(3):
        report = simulate(seed, profile, subject=subject)
        again = f'scripts/simulate --seed {seed} --subject {subject} --profile "{profile}"'
        assert not report.violations, f"{again}: {report.violations[:3]}"
        assert sum(fault.name.startswith("later version") for fault in report.faults) > 10


@pytest.mark.parametrize(
    ("subject", "planted"),
    [
        ("semaphore", replaced("(%S+) (%S+)(.*)')\n  is_readable", "(%S+) (%S+)$')\n  is_readable")),
        ("rwlock", replaced("string.match(wants, '^%d+')", "string.match(wants, '%d+$')")),
        ("latch", replaced("'^1 latch (%d+) '", "'^1 latch (%d+) $'")),
        ("barrier", replaced("'^1 barrier (%d+)( .*)'", "'^1 barrier (%d+)( )$'")),
    ],
)
def test_a_script_that_knows_all_that_is_stored_is_caught(subject, planted):
    assert any(simulate(seed, "later", subject=subject, lua=planted).violations for seed in range(20))


def forgotten_before_its_fence(source):
    """A person ends the quarantine while the clock is behind the fence. A record lasts 0.3 s in place of 5 minutes."""
    by_hand = replaced(
        "    write_record('-', '-', (split_free_text(tail)), 0)\n",
        "    write_record('-', '-', '')\n    call('PEXPIRE', RECORD, RECORD_TTL_MS)\n",
    )
    return by_hand(
        replaced(
            "RECORD_TTL_MS, QUEUE_TTL_MS, LIVENESS_MS, MAX_PER_CALL = 300000,",
            "RECORD_TTL_MS, QUEUE_TTL_MS, LIVENESS_MS, MAX_PER_CALL = 300,",
        )(source)
    )


@pytest.mark.rule(7)
def test_a_record_that_ends_before_its_fence_is_caught():
    for seed in range(200):
        report = simulate(seed, "set back", subject="lock", lua=forgotten_before_its_fence)
        if any(violation.rule == 3 for violation in report.violations):
            return
    pytest.fail("no seed below 200 breaks rule S3")


@pytest.mark.rule(6)
@pytest.mark.parametrize("subject", ["lock", "rwlock"])
def test_a_revocation_reaches_its_holder_within_a_second(subject):
    counts = Counter()
    for seed in range(8):
        report = simulate(seed, "revoked", subject=subject)
        assert not report.violations, f'scripts/simulate --seed {seed} --subject {subject} --profile "revoked"'
        counts += report.counts
    assert counts["revoke: done"] > 40
    assert counts["force: done"] > 10


@pytest.mark.parametrize(
    ("name", "value", "profile", "first"),
    [("SUBSCRIBE_AFTER", 1000.0, "revoked", 26), ("MAX_EARLY_REVOCATIONS", 0, "revoked early", 0)],
    ids=["nobody asks about young leases", "a push before its grant is forgotten"],
)
def test_a_revocation_that_comes_too_late_is_found(monkeypatch, name, value, profile, first):
    for module in (_book, _renewal):
        monkeypatch.setattr(module, name, value, raising=module is _book)
    caught(8, "semaphore", profile, first=first)


def test_the_faults_really_happen():
    wanted = {fault for profile in PROFILES.values() for fault in profile.rates} | {
        "request lost", "reply lost", "request doubled", "message slow", "message late", "connection refused",
        "connection reset", "connected to a replica", "push lost", "push doubled", "batch cut short",
        "subscription broken", "script unknown", "acquire timed out", "acquire unavailable", "extended",
        "lease dropped", "executed", "execute refused", "execute unavailable", "script ran after its caller gave up",
        "write refused by its fence", "ensure raised", "force: done", "revoke: done", "turn cancelled",
    } | {
        f"scheduled {what} struck at {point}"
        for point in ("before_send", "park", "wake", "handover") for what in ("cancel", "pause", "crash", "close")
    }  # fmt: skip
    assert never(wanted, (simulate(seed, "chaos", subject="lock") for seed in range(100, 125))) == set()


@pytest.mark.parametrize(
    ("subject", "wanted"),
    [
        ("rlock", {"acquired again by its holder", "acquire revoked"}),
        ("semaphore", {"limit set", "limit refused", "set_limit unavailable"}),
        ("rwlock", {"read beside its own lease", "downgraded", "upgrade refused", "write without exclusion"}),
        ("multi", {"several locks acquired at once"}),
        ("election", {"leader elected", "leader resigned", "change of leader observed", "observe failed: Unavailable"}),
        (
            "latch",
            {"latch opened", "latch counted down", "waiter went on", "wait raised BrokenBarrier", "wait timed out"},
        ),
        ("barrier", {"waiter went on", "barrier reset", "wait failed: BrokenBarrier"}),
        ("once", {"run succeeded", "run skipped", "run failed", "run revoked"}),
    ],
)
def test_each_subject_really_does_what_it_is_for(subject, wanted):
    assert never(wanted, (simulate(seed, "chaos", subject=subject) for seed in range(10))) == set()


def test_scheduled_cancellations_strike_at_every_await_of_the_core(monkeypatch):
    """Wherever the core waits for the server, a process can be stopped or die."""
    struck = set()
    pass_point = Task.pass_point

    def watched(self, point):
        if point in self.traps and self.traps[point][0] == 0 and point != "before_send":
            work, lines = self.work, []
            while hasattr(work, "cr_frame") and work.cr_frame is not None:
                lines.append((work.cr_code.co_filename.rpartition("/")[2], work.cr_frame.f_lineno))
                work = work.cr_await
            struck.update(lines)
        pass_point(self, point)

    monkeypatch.setattr(Task, "pass_point", watched)
    not_simulated = {
        "await self.runtime.sleep_until(self.runtime.now() + 0.1)",  # a worker after a bug
        # of threads that can be stopped, of callers who may wait for themselves, of drop-ins: no simulated caller does
        "await attempt.event.wait(min(attempt.until, attempt.look_at, poll, ask_at))",
    }
    awaits = []
    for module in (_core, _renewal, _undo, _waiters, _worker):
        file = module.__name__.rpartition(".")[2] + ".py"
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            called = ast.unparse(node.value.func) if isinstance(node, ast.Await) else ""
            if (
                called.endswith(("server.call", "server.call_many", ".wait", "sleep_until"))
                and (text := ast.unparse(node)) not in not_simulated
            ):
                awaits.append((text, {(file, line) for line in range(node.lineno, node.end_lineno + 1)}))
    missing = awaits
    for seed in range(500, 550):
        for subject in ("lock", "election"):  # leaders hold for long: that is when leases are renewed
            simulate(seed, "chaos", subject=subject)
        missing = [text for text, lines in awaits if not lines & struck]
        if not missing:
            break
    assert missing == []


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_seed_is_one_run(subject):
    first, again = simulate(5, subject=subject), simulate(5, subject=subject)
    assert first == again
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != simulate(14, subject=subject).fingerprint


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("seed", shares(2, 1, 9))
def test_a_run_repeated_by_its_plan_is_the_same_run(seed, subject):
    first = simulate(seed, subject=subject)
    plan = Plan(tuple(first.sections), frozenset(fault.name for fault in first.faults))
    assert simulate(seed, subject=subject, plan=plan).fingerprint == first.fingerprint


def test_what_is_left_out_does_not_change_the_rest():
    whole = simulate(6, "lossy cancel", subject="lock")
    without = simulate(6, "lossy cancel", subject="lock", plan=Plan(tuple(whole.sections), frozenset()))
    assert len(whole.faults) > 20
    assert without.faults == []
    texts = {section.name: section.text for section in whole.sections}
    assert len(without.sections) > len(texts) / 2  # uncancelled workers hold for longer, and have fewer sections
    assert all(texts[section.name] == section.text for section in without.sections)


# Planted bugs: each must be caught within the suite's seeds as they come, by the rule that it breaks.


def catch(rule, *, profiles, lua=str, subject="lock", first=0):
    """The seed that catches the bug, of the suite's for this subject and these profiles. See `mutations.catch`."""
    assert set(profiles) <= set(PROFILES)
    for seed in [*range(first, ALL_SEEDS), *range(first)]:
        if subject_of(seed) == subject and profile_of(seed).name in profiles:
            broken = {violation.rule for violation in simulate(seed, lua=lua).violations}
            if rule in broken:
                return seed
    return pytest.fail(f"no seed below {ALL_SEEDS} breaks rule S{rule}")


def a_deadline_counted_after_the_send(monkeypatch):
    counts_from_the_reply(monkeypatch, "acquire")


def no_undo_on_cancel(monkeypatch):
    def forgetful(self, attempt):
        done = self.runtime.event()
        done.set()
        return done

    monkeypatch.setattr(_undo.Undo, "add", forgetful)


def a_wake_without_check(monkeypatch):
    granted, ask = _waiters.Waiters.on_granted, _requests.Requests.ask_until_answered

    def wake(self, token):
        vars(self.server).setdefault("woken", set()).add(token)
        granted(self, token)

    async def credulous(self, question, args, *more):
        if args[0] == "acquire" and args[1] in vars(self.server).get("woken", ()):
            return [GRANTED, 1], self.runtime.now()
        return await ask(self, question, args, *more)

    monkeypatch.setattr(_waiters.Waiters, "on_granted", wake)
    monkeypatch.setattr(_requests.Requests, "ask_until_answered", credulous)


def an_execute_that_is_sent_again(monkeypatch):
    execute = _holding.Holding.execute

    async def stubborn(self, *args):
        try:
            return await execute(self, *args)
        except Unavailable:
            return await execute(self, *args)

    monkeypatch.setattr(_holding.Holding, "execute", stubborn)


IN_PYTHON = {
    "a deadline counted after the send": (a_deadline_counted_after_the_send, 1, ["loss", "pause", "chaos"]),
    "no undo on cancel": (no_undo_on_cancel, 5, ["cancel"]),
    "a wake without check": (a_wake_without_check, 1, ["loss", "pause", "chaos"]),
    "an execute that is sent again": (an_execute_that_is_sent_again, 11, ["loss", "chaos"]),
}
IN_LUA = {
    "renewal that re-creates": (
        replaced(
            "        states[#states + 1] = abstains_ms > 0 and is_gone and {ABSTAINS, abstention} or NOT_FOUND\n",
            "        if not holder then call('SET', KEYS[i], lease_token, 'PX', ttl) end\n"
            "        states[#states + 1] = holder and NOT_FOUND or GRANTED\n",
        ),
        5, ["slow", "lossy cancel", "pause"],
    ),
    "release by DEL": (
        replaced(
            "  local is_ours, retry =",
            "  call('DEL', LOCK)\n  local is_ours, retry =",
        ), 1, ["cancel"],
    ),
    "no tombstone": (
        replaced("if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end", ""), 5, ["loss", "lossy cancel"],
    ),
    "the newest first": (
        replaced("call('ZRANGE', QUEUE, position, position + batch_size - 1)", "call('ZRANGE', QUEUE, -1, -1)"),
        6, ["no faults"],
    ),
    "nobody is woken": (replaced("  publish(channel, 'granted ' .. waiter)\nend", "end"), 4, ["no faults"]),
    "a fence in whole seconds": (replaced("math.max(fence + 1, now_us)", "now_us - now_us % 1e6"), 2, ["no faults"]),
    "a record for ever": (
        replaced(
            "call('SET', RECORD, value, 'PX', string.format('%.0f', record_ttl))",
            "call('SET', RECORD, value)",
        ), 3,
        ["no faults"],
    ),
    "a confirmation that does not lengthen": (
        replaced("call('PEXPIRE', LOCK, math.max(pttl, ttl))", "", times=2), 1,
        ["pause", "loss", "crash"],
    ),
    "a renewal that shortens": (
        replaced("if call('PTTL', lock) < ttl then", "if true then"), 1, ["pause", "cancel"],
    ),
    "the dead are not skipped": (replaced("tonumber(alive_until) > now_ms", "true"), 4, ["crash"]),
    "an execute without the lease": (
        replaced("if not is_holder then return {NOT_FOUND} end", ""), 11, ["cancel"],
    ),
}  # fmt: skip


ANY = list(PROFILES)
IN_PERMITS = {
    "an expiry that keeps the sum": (
        "semaphore",
        replaced(
            "for _, holder in ipairs(expired) do remove_holder(holder) end",
            "for _, holder in ipairs(expired) do call('ZREM', HOLDERS, holder) call('HDEL', SHARES, holder) end",
        ),
        4, ["loss", "slow", "crash", "pause"],
    ),
    "the expired are not dropped": (
        "semaphore", replaced(
            "for _, holder in ipairs(expired) do remove_holder(holder) end",
            "",
        ), 4, ["pause", "cancel", "memory"],
    ),
    "a newcomer that overtakes": ("semaphore", replaced("(not blocker or blocker == token)", "true"), 6, ["no faults"]),
    "a reader that overtakes a writer": (
        "rwlock", replaced("(not blocker or blocker == token)", "true"), 6, ["no faults"],
    ),
    "a confirmation that comes twice gives permits back": (
        "semaphore",
        replaced(
            "    dequeue(token)\n    local _, held_fence, _, reason = read_share(token)",
            "    if not call('ZSCORE', QUEUE, token) then call('HINCRBY', SHARES, 'sum', -permits) end\n"
            "    dequeue(token)\n    local _, held_fence, _, reason = read_share(token)",
        ),
        1, ["loss", "lossy cancel", "chaos"],
    ),
    "a release that comes twice counts twice": (
        "semaphore",
        replaced(
            "  local is_ours = is_holder(token) or last_released == token\n",
            "  local is_ours = is_holder(token) or last_released == token\n"
            "  if last_released == token and read_sum() > 0 then call('HINCRBY', SHARES, 'sum', -1) end\n",
        ),
        1, ["lossy cancel", "chaos", "cancel"],
    ),
    "what a dead waiter was handed does not expire": (
        "semaphore",
        replaced(
            "pcall(grant, waiter, permits, handover_ttl, channel)",
            "pcall(grant, waiter, permits, 60000, channel)",
        ),
        3, ["no faults"],
    ),
    "a confirmation that does not lengthen": (
        "rwlock", replaced("if tonumber(call('ZSCORE', HOLDERS, token)) < lease_end then", "if false then"),
        1, ["pause", "crash", "cancel", "chaos"],
    ),
    "a renewal that shortens": (
        "semaphore", replaced("        if tonumber(lease_end) < get_time_ms() + ttl then", "        if true then"),
        1, ["loss", "lossy cancel"],
    ),
    "a fence in whole seconds": (
        "semaphore", replaced("math.max(fence + 1, now_us)", "now_us - now_us % 1e6"),
        2, ["no faults"],
    ),
    "holders for ever": ("semaphore", replaced("  call('PEXPIRE', HOLDERS, ttl)\n", ""), 3, ["no faults"]),
    "no tombstone": (
        "semaphore", replaced(
            "  if call('ZSCORE', TOMBSTONES, token) then return {NOT_FOUND} end\n",
            "",
        ), 5, ["lossy cancel"],
    ),
    "a lowered limit that is not told": (
        "semaphore", replaced("if permits > limit then", "if false then"),
        4, ["pause"],
    ),
    "a limit that was before": (
        "semaphore",
        replaced(
            "free, position, looked_at = limit - read_sum(), 0, 0",
            "free, position, looked_at = (tonumber(ARGV[10]) or limit) - read_sum(), 0, 0",
        ),
        1, ["cancel", "crash"],
    ),
    "a reader beside anybody": (
        "rwlock", replaced(
            "and own_lease ~= '' and permits == 1 and is_holder(own_lease)",
            "and permits == 1",
        ),
        1, ["cancel"],
    ),
    "a writer that waits for its own reading": (
        "rwlock", replaced("if is_free or reads_beside_own and blocker ~= '!' then", "if is_free then"), 12,
        ["no faults"],
    ),
}  # fmt: skip


def in_multi(old, new):
    """A change of multi.lua alone: workers also take its locks one by one, with the locks' own script."""
    return lambda source: replaced(old, new)(source) if "cjson" in source else source


IN_OTHERS = {
    "what was had before is kept when one is busy": (
        "multi", in_multi("earlier[1](earlier[2], {'release', earlier[3], '0', STAMP})", ""), 5, ["no faults"],
    ),
    "only the first is asked for": (
        "multi",
        in_multi("local ok, reply = pcall(call_script, script, keys, args)",
                 "local ok, reply = true, {GRANTED, 1}\n"
                 "    if i == 2 then ok, reply = pcall(call_script, script, keys, args) end"),
        1, ["no faults"],
    ),
    "watchers that are not told that nobody leads": (
        "election", replaced("term * 2 + (leader and 0 or 1)", "term * 2"), 4, ["no faults"],
    ),
    "watchers that are told of their own term": (
        "election", replaced("'-inf', '(' .. version", "'-inf', '(' .. (version - 2)"), 4, ["no faults"],
    ),
    "a term that does not grow": (
        "election", replaced("math.max(fence + 1, now_us)", "now_us - now_us % 1e6"), 2, ["no faults"],
    ),
    "an open latch that tells nobody": (
        "latch", replaced(
            "    add_tombstone(token, tostring(OPERATION_TTL_MS))\n    wake_some()\n",
            "    add_tombstone(token, tostring(OPERATION_TTL_MS))\n",
        ),
        4, ["no faults"],
    ),
    "a count that comes twice counts twice": (
        "latch", replaced(
            "if not was_counted then",
            "if true then",
        ), 12, ["loss"],
    ),
    "a count that is not undercut": (
        "latch", replaced("left = math.max(0, left - by)", "left = left - by"), 12, ["no faults"],
    ),
    "a latch that opens too early": (
        "latch", replaced(
            "return not left or left == 0 or reason",
            "return not left or left <= 1 or reason",
        ), 12, ["no faults"],
    ),
    "a latch that shuts when it is used again": (
        "latch", replaced("  if left then return end", "  if left and left > 0 then return end"), 12, ["no faults"],
    ),
    "a retried arrival counts twice": (
        "barrier", replaced("  if arrival then", "  if arrival and arrival <= passed then"),
        12, ["loss", "lossy cancel", "chaos"],
    ),
    "the others are not told": (
        "barrier", replaced(
            "  write_barrier()\n  wake_some()\n",
            "  write_barrier()\n",
        ), 4, ["no faults"],
    ),
    "one that leaves does not break it": (
        "barrier", replaced(
            "if not reason then break_barrier('a party left, or its timeout was over: ' .. token) end",
            "",
        ),
        12, ["no faults"],
    ),
    "the dead are waited for": ("barrier", replaced("local dead = call(", "local dead = nil and call("), 12, ANY),
    "who went on is not known": (
        "barrier", replaced(
            "    if arrival <= passed then\n",
            "    if arrival <= passed and not reason then\n",
        ), 12, ANY,
    ),
    "a reset that lets go on": (
        "barrier", replaced(
            "passed, woken, reason = arrivals, arrivals, nil",
            "passed, woken, reason = passed, woken, nil",
        ),
        12, ANY,
    ),
    "no note": ("once", replaced("    if note_ttl_ms > 0 then\n", "    if false then\n"), 12, ["no faults"]),
    "a note of the end only": (
        "once", replaced("math.max(at_least_left_ms, holder == token and tonumber(keep_ms) or 0)", "tonumber(keep_ms)"),
        12, ["no faults"],
    ),
    "a note of half the time": (
        "once",
        replaced("string.format('%.0f', note_ttl_ms)", "string.format('%.0f', note_ttl_ms / 2)"),
        12, ["no faults"],
    ),
    "a note of another time": (
        "once",
        replaced("string.format('%.0f', note_ttl_ms)", "string.format('%.0f', note_ttl_ms + 5000)"),
        12, ["no faults"],
    ),
    "a note that nobody reads": ("once", replaced("  if note then\n", "  if false then\n"), 12, ["no faults"]),
}  # fmt: skip


def every_entry_asks(monkeypatch):
    monkeypatch.setattr(reentrancy.HeldByCaller, "of", lambda *_: [])


def an_inner_release_gives_it_back(monkeypatch):
    monkeypatch.setattr(aio.Lease, "_leaves_inner", lambda _: False)


def an_upgrade_that_waits(monkeypatch):
    monkeypatch.setattr("interlock.primitives.permits.beside_own_leases", lambda primitive, _: primitive)


def whoever_is_named_first_is_waited_for_first(monkeypatch):
    monkeypatch.setattr("interlock._api.multi.sorted", lambda members, **_: list(members), raising=False)


def a_part_that_is_kept(monkeypatch):
    kept = []
    monkeypatch.setattr(aio.Lease, "_abandon", kept.append)


def a_multi_that_waits_for_a_silent_server(monkeypatch):
    together = multi_client.together
    monkeypatch.setattr(
        multi_client, "together", lambda core, requests, _, leases: together(core, requests, FOREVER, leases)
    )


def one_that_cannot_wait_stays(monkeypatch):
    acquire = _core.Core.acquire

    async def staying(self, attempt):
        attempt.is_queued = False
        return await acquire(self, attempt)

    monkeypatch.setattr(_core.Core, "acquire", staying)


def a_silence_that_is_told_as_a_refusal(monkeypatch):
    monkeypatch.setattr(_core, "last_answer_counts", lambda *_: True)


IN_THE_API = {
    "a silence that is told as a refusal": (
        "lock",
        a_silence_that_is_told_as_a_refusal,
        4,
        ["loss", "slow", "lossy cancel", "chaos"],
    ),
    "one that can't wait stays": ("barrier", one_that_cannot_wait_stays, 5, ["no faults", "cancel", "crash", "pause"]),
    "a multi that waits for a silent server": (
        "multi",
        a_multi_that_waits_for_a_silent_server,
        4,
        ["loss", "slow", "lossy cancel"],
    ),
    "whoever is named first is waited for first": (
        "multi",
        whoever_is_named_first_is_waited_for_first,
        4,
        ["no faults", "cancel", "crash", "pause"],
    ),
    "a part that is kept": ("multi", a_part_that_is_kept, 5, ["no faults"]),
    "every entry asks": ("rlock", every_entry_asks, 12, ["no faults"]),
    "an inner release gives it back": ("rlock", an_inner_release_gives_it_back, 12, ["no faults"]),
    "an upgrade that waits": ("rwlock", an_upgrade_that_waits, 12, ["no faults", "cancel", "crash"]),
}


@pytest.mark.parametrize("bug", IN_PYTHON)
def test_a_planted_bug_in_the_core_is_caught_and_shrinks(bug, monkeypatch):
    plant, rule, profiles = IN_PYTHON[bug]
    plant(monkeypatch)
    shrinks(catch(rule, profiles=profiles, first=FIRST.get(("lock", bug), 0)), rule)


@pytest.mark.rule(3)
@pytest.mark.parametrize("subject", ["lock", "rlock"])
def test_pushes_that_arrive_after_the_handover_break_no_rule(subject):
    runs = [simulate(seed, "late pushes", subject=subject) for seed in range(12)]
    assert not [violation for run in runs for violation in run.violations]
    assert sum(run.counts["push late"] for run in runs) > 10


@pytest.mark.parametrize("bug", IN_LUA)
def test_a_planted_bug_in_the_lua_is_caught_and_shrinks(bug):
    planted, rule, profiles = IN_LUA[bug]
    shrinks(catch(rule, profiles=profiles, lua=planted, first=FIRST.get(("lock", bug), 0)), rule, planted)


@pytest.mark.parametrize("bug", IN_PERMITS)
def test_a_planted_bug_in_permits_is_caught_and_shrinks(bug):
    subject, planted, rule, profiles = IN_PERMITS[bug]
    shrinks(
        catch(rule, profiles=profiles, lua=planted, subject=subject, first=FIRST.get((subject, bug), 0)), rule, planted
    )


@pytest.mark.parametrize("bug", IN_OTHERS)
def test_a_planted_bug_in_what_is_built_over_the_lock_is_caught_and_shrinks(bug):
    subject, planted, rule, profiles = IN_OTHERS[bug]
    shrinks(
        catch(rule, profiles=profiles, lua=planted, subject=subject, first=FIRST.get((subject, bug), 0)), rule, planted
    )


@pytest.mark.parametrize("bug", IN_THE_API)
def test_a_planted_bug_in_the_api_is_caught_and_shrinks(bug, monkeypatch):
    subject, plant, rule, profiles = IN_THE_API[bug]
    plant(monkeypatch)
    shrinks(catch(rule, profiles=profiles, subject=subject, first=FIRST.get((subject, bug), 0)), rule)


# Where the search begins, since few seeds catch it, or the stories of the first ones are long to shrink.
FIRST = {
    ("lock", "a deadline counted after the send"): 418, ("lock", "a wake without check"): 1093,
    ("lock", "an execute that is sent again"): 121, ("lock", "renewal that re-creates"): 1833,
    ("lock", "no tombstone"): 150, ("lock", "the newest first"): 162, ("lock", "nobody is woken"): 162,
    ("lock", "a fence in whole seconds"): 162, ("lock", "a record for ever"): 162,
    ("lock", "a confirmation that does not lengthen"): 526, ("lock", "a renewal that shortens"): 119,
    ("lock", "the dead are not skipped"): 147, ("lock", "an execute without the lease"): 1090,
    ("semaphore", "an expiry that keeps the sum"): 940, ("semaphore", "the expired are not dropped"): 317,
    ("semaphore", "a release that comes twice counts twice"): 42,
    ("rwlock", "a confirmation that does not lengthen"): 515, ("semaphore", "a renewal that shortens"): 40,
    ("semaphore", "a fence in whole seconds"): 45, ("semaphore", "a lowered limit that is not told"): 470,
    ("semaphore", "a limit that was before"): 181, ("rwlock", "a reader beside anybody"): 496,
    ("rwlock", "a writer that waits for its own reading"): 63,
    ("multi", "what was had before is kept when one is busy"): 828,
    ("election", "watchers that are told of their own term"): 990,
    ("latch", "a count that comes twice counts twice"): 580, ("barrier", "one that leaves does not break it"): 891,
    ("barrier", "the dead are waited for"): 1643, ("barrier", "who went on is not known"): 292,
    ("once", "a note of the end only"): 261, ("lock", "a silence that is told as a refusal"): 149,
    ("barrier", "one that can't wait stays"): 1793, ("multi", "whoever is named first is waited for first"): 378,
    ("multi", "a part that is kept"): 1728, ("rlock", "every entry asks"): 1656,
    ("rwlock", "an upgrade that waits"): 46,
}  # fmt: skip


def shrinks(seed, rule, lua=str):
    shrunk = shrink(seed, rule=rule, lua=lua)
    before, after = shrunk.original, shrunk.report
    assert {violation.rule for violation in after.violations} >= {rule}
    assert {fault.name for fault in after.faults} <= {fault.name for fault in before.faults}
    assert {section.name for section in after.sections} <= {section.name for section in before.sections}
    assert len(after.faults) <= 5, shrunk.story
    assert len(after.sections) <= 12, shrunk.story
    assert len(after.faults) + len(after.sections) <= (len(before.faults) + len(before.sections)) / 4
    assert len(after.lines) < len(before.lines) / 2  # a waiter in vain goes on asking
    plan = Plan(tuple(after.sections), frozenset(fault.name for fault in after.faults), rule)
    assert simulate(seed, lua=lua, plan=plan).fingerprint == after.fingerprint


def test_shrinking_is_deterministic_and_tells_a_story():
    planted = IN_LUA["no tombstone"][0]
    seed = catch(5, profiles=["chaos", "lossy cancel"], lua=planted)
    first, again = shrink(seed, lua=planted, rule=5), shrink(seed, lua=planted, rule=5)
    assert first.story == again.story
    assert first.report.fingerprint == again.report.fingerprint
    text = "\n".join(first.story)
    assert all(name in text for name in ("rule S5", *first.clients, *(fault.name for fault in first.faults)))
    with pytest.raises(ValueError, match="breaks no rule"):
        shrink(seed)


# The command line


def test_many_seeds_from_the_command_line(capsys, tmp_path):
    assert cli.main(["--seeds", "12", "--jobs", "2", "--first", "7", "--json", str(tmp_path / "sum")]) == 0
    spread = capsys.readouterr().out
    assert "12 runs, 12 distinct interleavings" in spread
    assert re.search(r"^subjects: lock \d+, rlock ", spread, re.MULTILINE)
    summary = json.loads((tmp_path / "sum").read_text())
    assert (summary["runs"], summary["broken"], summary["cut_short"]) == (12, 0, None)
    assert sum(summary["subjects"].values()) == 12
    assert cli.main(["--seeds", "12", "--jobs", "1", "--first", "7"]) == 0
    here = capsys.readouterr().out
    assert here.splitlines()[1:-1] == spread.splitlines()[1:-1]
    figures = figures_of(here)
    assert figures.keys() == figures_of(spread).keys()
    assert (figures["first"], figures["next"], figures["runs"]) == ("7", "19", "12")
    assert (figures["broken_runs"], figures["violations"]) == ("0", "0")
    assert float(figures["events_per_s"]) == pytest.approx(int(figures["events"]) / float(figures["seconds"]), rel=0.1)


def figures_of(printed):
    """The last line of what a batch prints: its words, by name."""
    title, *words = printed.splitlines()[-1].split()
    assert title == "summary:"
    return dict(word.split("=") for word in words)


def test_a_batch_runs_for_minutes_and_takes_all_profiles_in_turn(capsys, monkeypatch):
    monkeypatch.setattr(batch, "SHARE", 3)
    monkeypatch.setattr(cli, "SECONDS_OF_A_MINUTE", 1.0)
    started, now = time.monotonic(), time.time()
    assert cli.main(["--minutes", "1", "--jobs", "1"]) in {0, 1}  # a seed that nobody ran may well break a rule
    took, figures = time.monotonic() - started, figures_of(capsys.readouterr().out)
    assert 1.0 <= took < 60.0
    assert int(figures["next"]) == int(figures["first"]) + int(figures["runs"])
    assert int(figures["first"]) >= int(now * cli.FRESH_SEEDS)
    assert cli.main(["--minutes", "1", "--jobs", "1", "--first", "7", "--profile", "no faults"]) == 0
    assert figures_of(capsys.readouterr().out)["first"] == "7"


def test_the_seeds_of_all_worlds_are_dealt_out_to_all_profiles_and_their_subjects():
    choices = [choices_of(seed, None, None, EVERY) for seed in range(20 * len(ALL))]
    runs = {(profile.name, subject) for profile, subject in choices}
    assert {profile for profile, _ in runs} == {*ALL}
    for profile in ALL.values():
        kinds = {*(profile.subjects or subjects_of(profile.world))}
        assert {subject for chosen, subject in runs if chosen == profile.name} == kinds
        assert {choices_of(seed, profile.name, None, None)[1] for seed in range(2000)} == kinds


def test_one_seed_from_the_command_line(capsys):
    assert cli.main(["--seed", "4", "--subject", "rwlock", "--trace", "--match", "c0/w0"]) == 0
    out = capsys.readouterr().out
    assert "c0/w0#1 begins: rwlock(" in out
    assert "1 runs" in out
    assert "subjects: rwlock 1" in out
    assert cli.main(["--seed", "4", "--shrink"]) == 0
    assert "breaks no rule" in capsys.readouterr().out


def test_a_failing_seed_is_told_with_the_ways_to_look_at_it(capsys, monkeypatch):
    no_undo_on_cancel(monkeypatch)
    seed = catch(5, profiles=["cancel"])
    assert cli.main(["--seeds", "1", "--first", str(seed), "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert f"scripts/simulate --seed {seed} --shrink" in out
    assert "1 of 1 runs broke a rule" in out
    assert cli.main(["--seed", str(seed), "--shrink"]) == 1
    assert "VIOLATION of rule S15" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--seeds", "-1"], "at least 1"),
        (["--seeds", "many"], "whole number"),
        (["--first", "-1"], "at least 0"),
        (["--jobs", "0"], "at least 1"),
        (["--profile", "mild"], "lossy cancel"),
        (["--subject", "mutex"], "semaphore"),
        (["--subject", "latch", "--profile", "failover"], "lock, rlock"),
        (["--seed", "9", "--world", "one", "--profile", "failover"], "no check can judge a barrier"),
        (["--shrink"], "--shrink needs --seed"),
        (["--seed", "1", "--seeds", "2"], "--seeds can't be used with --seed"),
        (["--seed", "1", "--minutes", "2"], "--minutes can't be used with --seed"),
        (["--minutes", "1", "--seeds", "2"], "--seeds can't be used with --minutes"),
        (["--minutes", "0"], "at least 1"),
        (["--world", "all", "--subject", "latch"], "no check can judge a latch under 'all'"),
    ],
)
def test_wrong_arguments_are_told_clearly(arguments, word, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("when", ["at work", "at the start"])
def test_ctrl_c_sums_up_what_was_done(when):
    command = [sys.executable, "-m", "simulator", "--seeds", "1000000", "--jobs", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", ALIVE, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            if when == "at work":
                process.stdout.readline()  # the first share is done
            else:
                wait_until(lambda: len(children(process.pid)) >= 2 or process.poll() is not None)
            os.killpg(process.pid, signal.SIGINT)
            out = process.communicate(timeout=60)[0]
        except (AssertionError, ProcessLookupError, subprocess.TimeoutExpired) as error:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)  # it tells where it hangs
                time.sleep(1)
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{error!r}, status {process.poll()}: {process.communicate()[0]}")
        finally:
            process.kill()
    assert process.returncode == 130, out
    assert "distinct interleavings" in out
    assert "interrupted: " in out
    assert "Traceback" not in out


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


ALIVE = """\
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)
from simulator import cli
cli.PROGRESS_INTERVAL = 0.0
if __name__ == "__main__":
    sys.exit(cli.main(sys.argv[4:]))
"""


# The small Redis


NO_LEASES = ("renew", "execute", "revoke")  # no holder there: nobody revokes a waiter by its token


def of_locks(dice):
    """KEYS and ARGV of a message as lock.lua's header has them."""
    locks = [lock_resource(name, "lock:") for name in ("a", "b")]
    said = dice.choice(("", "", "t1")), dice.choice(("lock", "lock", "lock", "once"))
    return message(dice, locks, [(0, *said), (1, *said), (1, *said)], of_locks_only(dice))


def of_locks_only(dice):
    """What only the holder of a lock says."""
    token, ttl = f"t{dice.randrange(6)}", dice.choice((500, 2000))
    return [of_fences(dice), ("reserve", token, ttl, 64)]


def of_fences(dice):
    """A fence on which a quorum has agreed."""
    return "fence", f"t{dice.randrange(6)}", dice.choice((1, 1_700_000_060_000_000))


def of_permits(dice):
    """The same for permits.lua: two semaphores and a read-write lock."""
    kinds = [permits_resource("semaphore", "a", "lock:", 3), permits_resource("rwlock", "b", "lock:", ALL_PERMITS)]
    asks = [(1, "semaphore", dice.choice((1, 1, 2)), dice.choice((3, 3, 2)), "") for _ in range(2)]
    asks.append((dice.randrange(2), "rwlock", dice.choice((1, 1, ALL_PERMITS)), ALL_PERMITS, dice.choice(("", "t1"))))
    more = [
        ("limit", f"op{dice.randrange(9)}", "semaphore", dice.randrange(1, 4)),
        ("holders", "0", dice.randrange(1, 3)),
    ]
    return message(dice, kinds, asks, more)


def of_multi(dice):
    """Some of three locks and a semaphore; and each by itself, in the words of its own script."""
    alone = [lock_resource(name, "lock:") for name in ("a", "b", "c")]
    members = dice.sample([*alone, permits_resource("semaphore", "s", "lock:", 2)], dice.randrange(1, 5))
    said = "2000", "2000", "0", "ch0", "0"
    words = [
        json.dumps([each.script.name, len(each.keys), "acquire", f"t{dice.randrange(6)}", *said, *each.acquire_args])
        for each in members
    ]
    return [key for each in members for key in each.keys], ("acquire", *words)


def of_elections(dice):
    """The same for election.lua."""
    primitive = election_resource("a", "lock:")
    watching = "watch", f"w{dice.randrange(40)}", f"ch{dice.randrange(2)}"
    return message(dice, [primitive], [(1, "", "election")], [watching, watching, *of_locks_only(dice)])


def of_onces(dice):
    """The same for once.lua."""
    primitive = once_resource("a", "lock:", None)
    ends = "release", f"t{dice.randrange(6)}", "0", dice.choice((0, 500, 3000)), dice.choice((0, 0, 2000))
    more = [ends, ends, ends, ("forget", "-"), *of_locks_only(dice)]
    return message(dice, [primitive], [(0, "", "once"), (1, "", "once")], more, ["release"])


def of_latches(dice):
    """The same for latch.lua."""
    count, operation = dice.choice((1, 2, 40)), f"op{dice.randrange(99)}"
    counting = "count", operation, dice.choice((1, 1, 2, 50)), count, 10000
    more = [counting, counting, ("revoke", operation, "a good reason")]
    asks = [(1, count, 10000, "")] * 3 + [(0, count, 10000, "")]
    return message(dice, [latch_resource("a", "lock:", count, 10)], asks, more, NO_LEASES)


def of_barriers(dice):
    """The same for barrier.lua."""
    operation = f"op{dice.randrange(99)}"
    more = [("reset", operation), ("reset", operation), ("revoke", operation, "a good reason")]
    return message(dice, [barrier_resource("a", "lock:", 3)], [(1, 3, "")] * 5 + [(0, 3, "")], more, NO_LEASES)


def message(dice, primitives, asks, more, without=()):
    primitive, token, channel = dice.choice(primitives), f"t{dice.randrange(6)}", f"ch{dice.randrange(2)}"
    keys = primitive.keys
    ttl, life, heard = dice.choice((300, 2000, 5000)), dice.choice((300, 2000)), dice.choice((0, 0, 1))
    pairs = [word for _ in range(dice.randrange(1, 4)) for word in (f"t{dice.randrange(6)}", dice.choice((300, 2000)))]
    renewed = tuple(key for _ in pairs[::2] for key in dice.choice(primitives).renew_keys)
    common = [
        *[(keys, ("acquire", token, ttl, life, heard, channel, *ask)) for ask in asks],
        *[(keys, ("release", token, gone)) for gone in (0, 500, 60000)],
        (keys, ("heartbeat", channel, heard, *pairs)),
        (renewed, ("renew", *pairs)),
        ((*keys, "data"), ("execute", token, "SET", "data", token, "PX", ttl)),
        (keys, ("revoke", dice.choice((token, f"!{token}")), dice.randrange(2), "a good reason")),
        (keys, ("inspect", dice.choice((1, 10)))),
    ]
    return dice.choice([each for each in common if each[1][0] not in without] + [(keys, each) for each in more])


TOLD = {
    of_locks: lock_resource("a", "lock:"),
    of_permits: permits_resource("semaphore", "a", "lock:", 3),
    of_multi: multi_resource([lock_resource("a", "lock:")]),
    of_elections: election_resource("a", "lock:"),
    of_onces: once_resource("a", "lock:", None),
    of_latches: latch_resource("a", "lock:", 1, 10),
    of_barriers: barrier_resource("a", "lock:", 3),
}


@pytest.mark.parametrize("says", TOLD)
def test_the_simulated_server_answers_as_fakeredis_does(says, monkeypatch):
    """Messages exactly as the header of the script has them: all verbs but `keys`, which fakeredis can't."""
    fakeredis = pytest.importorskip("fakeredis")
    source = TOLD[says].script.source
    header = Header(source)
    verbs = Counter()
    for clock_starts, steps in (
        (0.0, (0.0, 0.001, 0.25, 1.5)),  # whole ms: within one, fakeredis rounds as Redis does not
        (0.123, (0.0, 0.002, 0.031, 2.9)),
        (86400.999, (0.01, 0.2, 20.0)),
    ):
        clock = [clock_starts]
        monkeypatch.setattr("time.time", lambda: 1_700_000_000 + clock[0])
        theirs, ours = fakeredis.FakeRedis(), Server(lambda: clock[0])
        dice = random.Random(str(steps))
        for step in range(400 if says in {of_locks, of_permits} else 200):
            clock[0] = round(clock[0] + dice.choice(steps), 6)
            keys, args = says(dice)
            header.check(keys, args)
            verbs[args[0]] += 1
            try:
                expected = theirs.eval(source, len(keys), *keys, *args, "")
            except Exception as error:
                expected = error
            answer = ours.eval(source, [key.encode() for key in keys], [*(str(arg).encode() for arg in args), b""])
            assert plain(answer) == plain(expected), (step, clock[0], keys, args)
    assert set(verbs) == set(header.verbs) - {"keys", "regrant", "voter"}  # the last two are for quorums


def plain(answer):
    """Errors by their text, and everything else as it is."""
    return str(answer) if isinstance(answer, Exception) else answer


def test_a_server_without_memory_refuses_what_redis_refuses():
    server = Server(lambda: 0.0)
    assert server.eval("return redis.call('SET', KEYS[1], 'v')", [b"k"], []) == b"OK"
    server.full = True
    refused = server.eval("return redis.call('SET', KEYS[1], 'w')", [b"k"], [])
    assert str(refused).startswith("OOM")
    assert server.eval("redis.call('DEL', KEYS[1]) return redis.call('SET', KEYS[1], 'x')", [b"k"], []) == b"OK"
    assert server.eval("return redis.pcall('GET', KEYS[1])", [b"k"], []) == b"x"
