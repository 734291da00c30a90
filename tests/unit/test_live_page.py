"""The live page without a browser and without a server: what its reader and its faces do."""

from __future__ import annotations

import pytest

from interlock._people.fleet import Look, Unread
from interlock._people.views import Name
from interlock.contrib.web.feed import Feed
from interlock.primitives.view import View

NOWHERE = "redis://127.0.0.1:1/0"  # nobody listens there


@pytest.fixture
def feed():
    made = Feed(NOWHERE, label="test")
    yield made
    made.close()


def look(*names, gone=()):
    """What a look has seen: that nobody holds these."""
    seen = {Name("lock", name, "lock:"): View(name, f"lock:{name}", "lock", "free", [], 0, [], 0) for name in names}
    return Look(1.0, seen, [Name("lock", name, "lock:") for name in gone], [], [], 1.0, Unread(), len(names), 0.0, 0.0)


def test_a_row_of_another_process_has_another_number(feed):
    other = Feed(NOWHERE, label="test")
    for each in (feed, other):
        each._note(look("stock"))
    assert feed._rows.keys().isdisjoint(other._rows)
    assert all(number < 2**53 for number in feed._rows)
