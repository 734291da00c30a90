"""The real core and the real Lua while servers restart and fail over. See docs/simulator.md."""

import math
from collections import Counter

import pytest

pytest.importorskip("lupa")

from interlock._quarantine import identity, lossless
from interlock._quarantine.server_history import ServerHistory
from interlock._quarantine.stamp import IdentityStamp
from model.mutations import catch, never, replaced, shares
from simulator import (
    SERVERS,
    outage_kinds,
    profile_of,
    profiles,
    server_group,
    shrink,
    sim_pool,
    sim_server,
    simulate,
    subject_of,
)
from simulator.coroutines import Process
from simulator.scheduler import World

SEEDS = 50  # and all of them with --full:
ALL_SEEDS = 2000
SHARE = 50
SUBJECTS = ("lock", "rlock", "rwlock", "semaphore", "election", "once", "multi")


@pytest.mark.rule(1, 3, 4, 6, 7, 8, 9, 10)
@pytest.mark.parametrize("first", shares(SEEDS, SHARE, ALL_SEEDS))
def test_no_rule_is_broken(first):
    for seed in range(first, first + SHARE):
        report = simulate(seed, world="servers")
        again = f"scripts/simulate --world servers --seed {seed} --shrink"
        assert not report.violations, f"{again}: {report.violations[:3]}"


def test_the_seeds_are_dealt_out_to_all_subjects_and_profiles():
    runs = Counter((subject_of(seed, "servers"), profile_of(seed, "servers").name) for seed in range(1000))
    assert runs.keys() == {(subject, profile) for subject in SUBJECTS for profile in SERVERS}
    assert min(runs.values()) >= 20


def test_the_faults_really_happen():
    wanted = {fault for profile in SERVERS.values() for fault in profile.rates}
    of_quorums = {"emptied", "re-seeded by a member", "re-seeded by its replica", "address moved"}
    assert {*outage_kinds.KINDS, "one way"} - {"primary paused", "spare"} - of_quorums <= wanted
    wanted |= {"proven lossless", "lost leases that nobody knew of", "push without a subscriber", "script unknown"}
    assert never(wanted, (simulate(seed, world="servers") for seed in range(140))) == set()


@pytest.mark.rule(1, 7, 10)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_primary_that_stood_still_and_goes_on_breaks_no_rule(subject):
    counts = Counter()
    for seed in range(30):
        report = simulate(seed, "paused", subject=subject)
        again = f"scripts/simulate --profile paused --subject {subject} --seed {seed} --shrink"
        assert not report.violations, f"{again}: {report.violations[:3]}"
        counts += report.counts
    assert counts["primary paused"]
    assert counts["connection to an old primary dropped"]


@pytest.mark.rule(1, 7, 10)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_spare_that_takes_the_place_of_a_dead_server_breaks_no_rule(subject):
    counts = Counter()
    for seed in range(30):
        report = simulate(seed, "spare", subject=subject)
        again = f"scripts/simulate --profile spare --subject {subject} --seed {seed} --shrink"
        assert not report.violations, f"{again}: {report.violations[:3]}"
        counts += report.counts
    assert counts["spare"]


@pytest.mark.parametrize("profile", SERVERS)
def test_a_seed_is_one_run(profile):
    first, again = (simulate(3, profile, subject="lock") for _ in range(2))
    assert first == again
    assert first.fingerprint == again.fingerprint


# Planted bugs


IN_LUA = {
    "no quarantine": ("lock", 1, "snapshot", replaced("if IDENTITY == '-' or recorded ==", "if true or recorded ==")),
    "no quarantine of permits": (
        "semaphore", 13, "failover", replaced("if IDENTITY == '-' or recorded ==", "if true or recorded =="),
    ),
    "an identity that is not written": (
        "lock", 13, "snapshot", replaced("granted_by, last_ttl = IDENTITY,", "granted_by, last_ttl = '-',",
                                         "identity_at and string.sub(plain_record", "false and string.sub(plain_record",
                                         "stored_fence = previous == '-' and 0 or nil", "stored_fence = nil"),
    ),
    "a memory that nobody asks": (
        "lock", 13, "empty", replaced("recorded, evidence, successor = previous, nil, nil", "recorded = '-'"),
    ),
    "a marker that nobody heeds": (
        "rlock", 13, "empty", replaced("    if granted_by == '-' then granted_by = evidence end\n", ""),
    ),
    "a confirmation that takes the record over": (
        "semaphore", 13, "snapshot", replaced("    if reason then return {REVOKED, reason} end\n",
                                              "    if reason then return {REVOKED, reason} end\n"
                                              "    granted_by = IDENTITY write_record(0)\n"),
    ),
    "a quarantine that hands over": (
        "lock", 13, "snapshot", replaced("if apply_quarantine() then return nil, 0 end", ""),
    ),
    "half a quarantine": ("rwlock", 13, "empty", replaced("since + wait + grace", "since + wait / 2")),
    "a word that ends any quarantine of a lock": (
        "lock", 13, "ended by hand", replaced(
            "string.match(evidence, '.*>') ~= string.match(named_evidence, '.*>')",
            "false",
        ),
    ),
    "a word that ends any quarantine of permits": (
        "rwlock", 13, "ended by hand", replaced("string.match(evidence, '.*>') ~= named_evidence", "false"),
    ),
    "a run that ends before it began": (
        "once", 12, "failover", replaced("math.max(started_us, time[1]", "math.max(0, time[1]"),
    ),
    "a reader that queues behind its own lease": (
        "rwlock", 4, "failover", replaced("if reads_beside_own then", "if false then"),
    ),
    "a quarantine without an end": (
        "lock", 4, "snapshot", replaced("since + wait + grace - get_time_us() / 1000", "30000"),
    ),
}  # fmt: skip


def an_isolated_primary_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(profiles, "ISOLATION_GRACE", 0.0)


def every_restart_is_clean(monkeypatch):
    monkeypatch.setattr(sim_server, "least_lossless_ttl", lambda *_: 0.0)


def clocks_are_not_compared(monkeypatch):
    monkeypatch.setattr(lossless, "least_ttl", lambda *_: 0.0)


def nobody_asks_with_which_keys_a_process_began(monkeypatch):
    monkeypatch.setattr(identity, "_loaded", lambda *_: False)


def a_promotion_is_as_old_as_its_process(monkeypatch):
    monkeypatch.setattr(identity.Facts, "promoted", property(lambda _: False))


def who_connects_again_remembers_nothing(monkeypatch):
    first_stamp = ServerHistory._first_stamp

    def forgetful(self, *args):
        before = self.latest
        if not before.in_quarantine:
            self.latest = IdentityStamp(None, self.quarantine_seconds, "-")
        try:
            return first_stamp(self, *args)
        finally:
            self.latest = before

    monkeypatch.setattr(ServerHistory, "_first_stamp", forgetful)


def a_connection_is_trusted_for_ever(monkeypatch):
    monkeypatch.setattr(sim_pool, "TRUSTED_FOR", math.inf)


def a_spare_counts_from_its_own_start(monkeypatch):
    monkeypatch.setattr(IdentityStamp, "mark_spare", lambda _: None)


def an_answer_counts_when_it_comes(monkeypatch):
    monkeypatch.setattr(
        sim_pool.SimConnection,
        "answered",
        lambda self, _sent: setattr(self, "last_answered_sent", self.pool.runtime.now()),
    )


IN_PYTHON = {
    "an isolated primary is not waited for": ("lock", 13, "isolated", an_isolated_primary_is_not_waited_for),
    "who connects again remembers nothing": ("lock", 13, "empty", who_connects_again_remembers_nothing),
    "every restart is clean": ("lock", 13, "snapshot", every_restart_is_clean),
    "clocks are not compared": ("rwlock", 1, "failover", clocks_are_not_compared),
    "a connection is trusted for ever": ("semaphore", 1, "paused", a_connection_is_trusted_for_ever),
    "a spare counts from its own start": ("lock", 13, "spare", a_spare_counts_from_its_own_start),
    "an answer counts when it comes": ("rlock", 2, "paused", an_answer_counts_when_it_comes),
    "nobody asks with which keys a process began": (
        "lock",
        13,
        "snapshot",
        nobody_asks_with_which_keys_a_process_began,
    ),
    "a promotion is as old as its process": ("lock", 13, "failover", a_promotion_is_as_old_as_its_process),
}


# Where the search begins, since few seeds catch it.
FIRST = {
    "an identity that is not written": 139, "a marker that nobody heeds": 189, "a run that ends before it began": 81,
    "a confirmation that takes the record over": 96, "clocks are not compared": 57,
    "nobody asks with which keys a process began": 57,
}  # fmt: skip


@pytest.mark.parametrize("bug", IN_LUA)
def test_a_planted_bug_in_the_lua_is_caught(bug):
    subject, rule, profile, planted = IN_LUA[bug]
    catch(rule, subject, profile, planted, FIRST.get(bug, 0))


@pytest.mark.parametrize("bug", IN_PYTHON)
def test_a_planted_bug_in_a_client_is_caught(bug, monkeypatch):
    subject, rule, profile, plant = IN_PYTHON[bug]
    plant(monkeypatch)
    catch(rule, subject, profile, first=FIRST.get(bug, 0))


def test_a_lost_lease_makes_a_short_story():
    planted = IN_LUA["no quarantine"][-1]
    seed = catch(1, "lock", "snapshot", planted)
    shrunk = shrink(seed, "snapshot", subject="lock", rule=1, lua=planted)
    assert len(shrunk.faults) <= 3, shrunk.story
    assert len(shrunk.sections) <= 4, shrunk.story


def test_a_proof_is_of_the_server_that_was_asked_for():
    """The answers of a server that came meanwhile prove nothing."""
    place = server_group.ServerGroup(World(0))
    process, before = Process(place.world, "c0"), place.primary
    epoch = ServerHistory(60.0).identify(before.facts(), sim_pool.ADDRESS)
    assert lossless.least_lossless_ttl(place.seen_by(process), "another:one", epoch) == math.inf
    place.primary = place.new_host()
    assert lossless.least_lossless_ttl(place.seen_by(process), "another:one", epoch) is None


def test_what_is_waited_for_is_not_forgotten_with_the_next_change():
    """A failover that lost something, then one that lost nothing: leases of before the first may still last."""
    place, memory = server_group.ServerGroup(World(0)), ServerHistory(60.0)
    first = memory.identify(place.primary.facts(), sim_pool.ADDRESS)
    evidence = [memory.identify(place.new_host().facts(), sim_pool.ADDRESS).previous for _ in range(2)]
    assert evidence == [f"@@{first.identity}"] * 2  # nobody knows whether these processes ran beside the first one
