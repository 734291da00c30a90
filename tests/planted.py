"""Planted bugs: a change of a script that is really made, and the search for the seed that it breaks."""

from __future__ import annotations

import pytest

from simulator import simulate


def replaced(old, new):
    def planted(source):
        assert source.count(old) == 1, f"the script has changed: {old!r}"
        return source.replace(old, new)

    return planted


def catch(rule, subject, profile, lua=str):
    for seed in range(200):
        if any(violation.rule == rule for violation in simulate(seed, profile, subject=subject, lua=lua).violations):
            return seed
    return pytest.fail(f"no seed below 200 breaks rule {rule}")
