"""How far one reads to follow an uncontended acquire: see harness/trip.py, which holds the ceilings and the goal."""

from __future__ import annotations

import pytest

from harness.trip import CEILINGS, TRIPS, size, sums, table, without_transports


@pytest.mark.parametrize("mode_name", TRIPS)
def test_an_acquire_is_no_longer_to_read_than_it_was(mode_name, server):
    steps = TRIPS[mode_name](server.url)
    now, ceiling = size(without_transports(steps)), CEILINGS[mode_name]
    assert now.files <= ceiling.files, f"{table(steps)}\n\n{sums(mode_name, steps)}"
    assert now.functions <= ceiling.functions, f"{table(steps)}\n\n{sums(mode_name, steps)}"
