"""How far one reads to follow an acquire: see harness/trip.py, which holds the ceilings and the goals."""

from __future__ import annotations

import pytest

from harness.trip import TRIPS, size, sums, table, without_transports


@pytest.mark.parametrize("name", TRIPS)
def test_an_acquire_is_no_longer_to_read_than_it_was(name, server):
    trip = TRIPS[name]
    steps = trip.of(server.url)
    for now, ceiling in (
        (size(steps), trip.ceiling),
        (size(without_transports(steps)), trip.ceiling_without_transports),
    ):
        assert now.files <= ceiling.files, f"{table(steps)}\n\n{sums(name, steps)}"
        assert now.functions <= ceiling.functions, f"{table(steps)}\n\n{sums(name, steps)}"
