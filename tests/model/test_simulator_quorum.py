"""The real core and the real Lua over several servers that know nothing of each other. See docs/simulator.md."""

from collections import Counter

import pytest

pytest.importorskip("lupa")

from interlock._servers import quorum
from interlock._servers import quorum_votes as _votes
from interlock.primitives.codes import QUEUED
from interlock.primitives.messages import NO_KEY, RENEWED, Granted, HeartbeatReply
from model.mutations import catch, never, replaced, shares
from simulator import VOTERS, WORLDS, profile_of, shrink, sim_pool, simulate, subject_of

SEEDS = 50  # and all of them with --full:
ALL_SEEDS = 2000
SHARE = 50
PROFILES = WORLDS["quorum"]
SUBJECTS = ("lock", "rlock", "election", "once", "multi")


@pytest.mark.rule(1, 3, 7, 10)
@pytest.mark.parametrize("first", shares(SEEDS, SHARE, ALL_SEEDS))
def test_no_rule_is_broken(first):
    for seed in range(first, first + SHARE):
        report = simulate(seed, world="quorum")
        again = f"scripts/simulate --world quorum --seed {seed} --shrink"
        assert not report.violations, f"{again}: {report.violations[:3]}"


@pytest.mark.rule(7, 10)
@pytest.mark.parametrize("subject", sorted({subject for profile in VOTERS.values() for subject in profile.subjects}))
@pytest.mark.parametrize("profile", VOTERS)
def test_no_rule_is_broken_while_servers_lose_what_they_granted(profile, subject):
    for seed in range(5):
        report = simulate(seed, profile, subject=subject)
        again = f"scripts/simulate --profile '{profile}' --subject {subject} --seed {seed} --shrink"
        assert not report.violations, f"{again}: {report.violations[:3]}"


def test_servers_really_lose_what_they_granted():
    wanted = {fault for profile in VOTERS.values() for fault in profile.rates}
    runs = (simulate(seed, profile, subject="lock") for seed in range(20) for profile in VOTERS)
    assert never(wanted, runs) == set()


def test_the_seeds_are_dealt_out_to_all_subjects_and_profiles():
    runs = Counter((subject_of(seed, "quorum"), profile_of(seed, "quorum").name) for seed in range(1000))
    assert runs.keys() == {(subject, profile) for subject in SUBJECTS for profile in PROFILES}
    assert min(runs.values()) >= 20


def test_the_faults_really_happen():
    wanted = {fault for profile in PROFILES.values() for fault in profile.rates}
    wanted |= {"request lost", "reply lost", "request doubled", "message late", "connection reset"}
    grants = []

    def runs():
        for seed in range(80):
            grants.append((report := simulate(seed, world="quorum")).grants)
            yield report

    assert never(wanted, runs()) == set()
    assert sum(grants) / len(grants) > 12


@pytest.mark.parametrize("profile", PROFILES)
def test_a_seed_is_one_run(profile):
    first, again = (simulate(3, profile, subject="lock") for _ in range(2))
    assert first == again
    assert first.fingerprint == again.fingerprint


# Planted bugs


def half_is_enough(monkeypatch):
    monkeypatch.setattr(_votes.Votes, "majority", property(lambda said: said.total // 2))


def one_renewal_is_enough(monkeypatch):
    renewed = _votes._renewed_state
    monkeypatch.setattr(_votes, "_renewed_state", lambda votes: RENEWED if RENEWED in votes.replies else renewed(votes))


def the_highest_fence_is_not_agreed_on(monkeypatch):
    verb = _votes.VERBS["acquire"]

    def hasty(votes, rules):
        outcome = verb.merge(votes, rules)
        return Granted(outcome.fence) if isinstance(outcome, _votes.Unagreed) else outcome

    monkeypatch.setitem(_votes.VERBS, "acquire", verb._replace(merge=hasty))


def a_heartbeat_finds_nothing(monkeypatch):
    def nothing(votes, _rules):
        return HeartbeatReply(NO_KEY, b"", [QUEUED for _ in votes.call.waiters])

    monkeypatch.setitem(_votes.VERBS, "heartbeat", _votes.VERBS["heartbeat"]._replace(merge=nothing))
    monkeypatch.setattr(sim_pool.SimPool, "receive_push", lambda *_: None)


def clocks_run_alike(monkeypatch):
    monkeypatch.setattr(quorum.QuorumServer, "drift", 0.0)
    monkeypatch.setattr(quorum, "QUORUM_DRIFT", 0.0)


IN_PYTHON = {
    "half is enough": ("lock", 1, "q loss", half_is_enough),
    "one renewal is enough": ("lock", 1, "q loss", one_renewal_is_enough),
    "the highest fence is not agreed on": ("lock", 2, "q loss", the_highest_fence_is_not_agreed_on),
    "a heartbeat finds nothing": ("lock", 4, "q no faults", a_heartbeat_finds_nothing),
    "clocks run alike": ("lock", 1, "q crash", clocks_run_alike),
}


IN_LUA = {
    "a server votes that has forgotten": (
        "lock", 1, "q emptied", replaced("math.max(0, since + longest - now_ms)", "0"),
    ),
    "a fence that is stored by nobody": (
        "lock", 2, "q loss", replaced("  fence = math.max(fence, agreed_fence)\n", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", IN_LUA)
def test_a_planted_bug_in_the_lua_is_caught(bug):
    subject, rule, profile, planted = IN_LUA[bug]
    catch(rule, subject, profile, planted)


@pytest.mark.parametrize("bug", IN_PYTHON)
def test_a_planted_bug_in_a_client_is_caught(bug, monkeypatch):
    subject, rule, profile, plant = IN_PYTHON[bug]
    plant(monkeypatch)
    catch(rule, subject, profile)


def test_two_holders_make_a_short_story(monkeypatch):
    half_is_enough(monkeypatch)
    seed = catch(1, "lock", "q loss")
    shrunk = shrink(seed, "q loss", subject="lock", rule=1)
    assert len(shrunk.faults) <= 5, shrunk.story
    assert len(shrunk.sections) <= 6, shrunk.story
