"""Seeds of the simulator, and planted bugs: a change of a script that is really made, and the seed that it breaks."""

from __future__ import annotations

import pytest

from simulator import simulate


def replaced(old, new):
    def planted(source):
        assert source.count(old) == 1, f"the script has changed: {old!r}"
        return source.replace(old, new)

    return planted


def shares(seeds, size, full):
    """The first seed of each share of so many; those of the rest, up to `full`, are run with --full only."""
    return [pytest.param(first, marks=() if first < seeds else pytest.mark.full) for first in range(0, full, size)]


def catch(rule, subject, profile, lua=str, first=0):
    """The seed that catches it. The search takes long where few seeds do: it may begin at one that is known to."""
    for seed in range(first, first + 200):
        if any(violation.rule == rule for violation in simulate(seed, profile, subject=subject, lua=lua).violations):
            return seed
    return pytest.fail(f"no seed from {first} to {first + 199} breaks rule {rule}")
