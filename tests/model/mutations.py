"""Seeds of the simulator, and planted bugs: a change of a script that is really made, and the seed that it breaks."""

from __future__ import annotations

from collections import Counter

import pytest

from interlock._client.retries import Requests
from simulator import simulate


def replaced(old, new, *more, times=1):
    """A change of a script: of each text into the next one. Each stands in the script so many times."""

    def planted(source):
        for before, after in zip((old, *more[::2]), (new, *more[1::2]), strict=True):
            assert source.count(before) == times, f"the script has changed: {before!r}"
            source = source.replace(before, after)
        return source

    return planted


def counts_from_the_reply(monkeypatch, verb):
    """Plant: each request with this verb seems to be sent when its reply arrives."""
    ask = Requests.ask_until_answered

    async def late(self, question, args, *more):
        reply, sent = await ask(self, question, args, *more)
        return reply, self.runtime.now() if args[0] == verb else sent

    monkeypatch.setattr(Requests, "ask_until_answered", late)


def shares(seeds, size, full):
    """The first seed of each share of so many; those from `seeds` up to `full` run with --full only."""
    return [pytest.param(first, marks=() if first < seeds else pytest.mark.full) for first in range(0, full, size)]


def never(wanted, reports):
    """Those of the wanted that no run counts. No more runs begin once each of them has been counted."""
    counts = Counter()
    for report in reports:
        counts += report.counts
        if all(counts[each] for each in wanted):
            break
    return {each for each in wanted if not counts[each]}


def catch(rule, subject, profile, lua=str, first=0):
    """The first seed from `first` on that catches the bug. Where few seeds do, `first` is one that is known to."""
    for seed in range(first, first + 200):
        if any(violation.rule == rule for violation in simulate(seed, profile, subject=subject, lua=lua).violations):
            return seed
    return pytest.fail(f"no seed from {first} to {first + 199} breaks rule S{rule}")
