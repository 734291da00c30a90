"""Simulated clients that are restored twice from a snapshot: two processes with one memory, under faults."""

from __future__ import annotations

from collections import Counter

import pytest

from interlock._client import acquiring as _core
from simulator import SNAPSHOTS, simulate

SUBJECTS = ("lock", "semaphore", "rwlock", "election", "once")
IN_QUORUM = ("lock", "rlock", "multi", "election")
SEEDS = 3


@pytest.mark.rule(8, 11)
@pytest.mark.parametrize("profile", SNAPSHOTS)
def test_two_with_one_memory_exclude_each_other(profile):
    counts = Counter()
    for subject in IN_QUORUM if profile.startswith("q ") else SUBJECTS:
        for seed in range(SEEDS):
            report = simulate(seed, profile, subject=subject)
            again = f'scripts/simulate --seed {seed} --subject {subject} --profile "{profile}"'
            assert not report.violations, f"{again}: {report.violations[:3]}"
            counts += report.counts
    assert counts["restored twice"] > 5
    assert counts["push to two subscribers"] > 5, "both listen to the channel that was in the snapshot"


def test_a_token_that_is_made_of_what_is_in_the_snapshot_is_found(monkeypatch):
    real = _core.Core.attempt

    def numbered(self, *args, **kwargs):
        made = real(self, *args, **kwargs)
        self.made = getattr(self, "made", 0) + 1
        made.token = f"{made.token.rpartition('/')[0]}/{self.made:032x}"
        return made

    monkeypatch.setattr(_core.Core, "attempt", numbered)
    assert not simulate(0, "no faults", subject="lock").violations, "without a snapshot they are no two's"
    broken = {
        violation.rule
        for seed in range(SEEDS)
        for violation in simulate(seed, "restored twice", subject="lock").violations
    }
    assert 1 in broken
