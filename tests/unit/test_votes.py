"""What several servers' replies mean together: the tables of `_servers/quorum_votes.py`, without any server."""

from __future__ import annotations

import pytest

from interlock._servers.quorum_votes import Request, Split, Unagreed
from interlock.primitives.codes import (
    ABSTAINS,
    BUSY,
    CROWDED,
    GRANTED,
    NOT_FOUND,
    QUARANTINE,
    QUEUED,
    RETRY,
    REVOKED,
)
from interlock.primitives.messages import Queued
from interlock.primitives.scripts import load

ME, OTHER = b"me/1", b"other/2"
ACQUIRE = ("acquire", "me/1", "1000", "1000", "0", "-", "inf", "", "lock")


def merged(args, *votes, pending=0, total=3, script="lock"):
    """The merged reply as the script would encode it, or the outcome that no script has."""
    request = Request.parse((load(script), (), args), "voter")
    outcome = request.merge([request.parse_reply(vote) for vote in votes], pending, total)
    return outcome.encode() if hasattr(outcome, "encode") else outcome


def queued(holder, pttl=500, head=0):
    return [QUEUED, holder, pttl, head]


@pytest.mark.parametrize(
    ("votes", "pending", "reply"),
    [
        ([[GRANTED, 5], [GRANTED, 5]], 1, [GRANTED, 5]),
        ([[GRANTED, 5], [GRANTED, 6]], 0, Unagreed(6)),
        ([[GRANTED, 5], [GRANTED, 6]], 1, None),  # the third may say 6, too
        ([[GRANTED, 5], [GRANTED, 6], [GRANTED, 6]], 0, [GRANTED, 6]),
        ([[GRANTED, 5], queued(OTHER)], 1, None),
        ([queued(OTHER, 300), queued(OTHER, 500)], 1, [QUEUED, OTHER, 500, 0]),  # over when a majority is free
        ([[GRANTED, 5], queued(OTHER, 300), queued(OTHER, 500)], 0, [QUEUED, OTHER, 300, 1]),
        ([[GRANTED, 5], queued(OTHER, 300), queued(b"third/3", 500)], 0, Split(Queued(OTHER, 300, True), True)),
    ],
)
def test_a_majority_of_votes_acquires(votes, pending, reply):
    assert merged(ACQUIRE, *votes, pending=pending) == reply


def test_a_split_vote_is_seen_as_soon_as_no_majority_is_possible():
    votes = [[GRANTED, 5], [GRANTED, 5], queued(OTHER), queued(OTHER)]
    split = merged(ACQUIRE, *votes, total=4)
    assert isinstance(split, Split)
    assert split.goes_first  # of two equal shares, "me" comes before "other"
    theirs = [queued(ME), queued(ME), [GRANTED, 5], [GRANTED, 5]]
    assert not merged(("acquire", "other/2", *ACQUIRE[2:]), *theirs, total=4).goes_first


@pytest.mark.parametrize(
    ("states", "pending", "state"),
    [
        ([GRANTED, GRANTED], 1, GRANTED),
        ([GRANTED, NOT_FOUND, NOT_FOUND], 0, NOT_FOUND),
        ([NOT_FOUND, [REVOKED, b"disk full"]], 1, [REVOKED, b"disk full"]),
        ([GRANTED, NOT_FOUND], 1, None),
        ([GRANTED, b"WRONGTYPE", NOT_FOUND], 0, b"only 1 of 3 servers of the quorum renewed it"),  # tried again
        # Whoever abstains confirms nothing, whether it has the lease or lost it; but that is no loss either.
        ([GRANTED, [ABSTAINS, b""], GRANTED], 0, GRANTED),
        ([GRANTED, [ABSTAINS, b""]], 1, None),
        (
            [GRANTED, [ABSTAINS, b""], [ABSTAINS, b"r 1"]],
            0,
            b"only 1 of 3 servers of the quorum renewed it, and 2 abstained",
        ),
        (
            [NOT_FOUND, [ABSTAINS, b"r 1"], [ABSTAINS, b"r 1"]],
            0,
            b"only 0 of 3 servers of the quorum renewed it, and 2 abstained",
        ),
        ([NOT_FOUND, [ABSTAINS, b"r 1"], NOT_FOUND], 0, NOT_FOUND),
    ],
)
def test_a_majority_of_votes_renews(states, pending, state):
    assert merged(("renew", "me/1", "1000"), *([each] for each in states), pending=pending) == (
        None if state is None else [state]
    )


@pytest.mark.parametrize(
    ("votes", "pending", "reply"),
    [
        ([[1, 0], [1, 0]], 1, [1, 0]),
        ([[1, 0], [0, 0], [1, 1]], 0, [1, 1]),  # one server has lost it: no harm; and it is to come again
        ([[0, 0], [0, 0]], 1, [0, 0]),
        ([[1, 0], [0, 0]], 1, None),
    ],
)
def test_a_majority_of_votes_releases(votes, pending, reply):
    assert merged(("release", "me/1", "0"), *votes, pending=pending) == reply


def test_an_observer_sees_no_term_without_a_majority():
    """A server outside the majority may have proposed a higher term; a server of the majority may be away now."""
    watch = ("watch", "w", "channel")
    assert merged(watch, [GRANTED, ME, 900, 5], [GRANTED, ME, 800, 5], [GRANTED, ME, 700, 9]) == [GRANTED, ME, 800, 5]
    assert merged(watch, [GRANTED, ME, 900, 5], [GRANTED, ME, 700, 9])[1] == b""
    assert merged(watch, [GRANTED, ME, 900, 5], [GRANTED, b"", -2, 5], [GRANTED, b"", -2, 4])[1] == b""


def test_inspect_shows_no_fence_without_a_majority():
    inspect = ("inspect", "1")
    five, nine = (b"1 lock %d a:b 1000 - me/1 c" % fence for fence in (5, 9))
    agreed = merged(inspect, [ME, 900, nine, 0, 0, 0], [ME, 800, five, 0, 0, 0], [ME, 700, five, 0, 7, 2, OTHER])
    assert agreed == [ME, 800, five, 0, 7, 2, OTHER]
    assert merged(inspect, [ME, 900, nine, 0, 0, 0], [ME, 700, five, 0, 0, 0])[2] == b"1 lock 0 a:b 1000 - me/1 c"
    assert merged(inspect, [b"", -2, nine, 0, 0, 0], [ME, 700, five, 0, 0, 0], [b"", -2, b"", 0, 0, 0])[:3] == [
        b"",
        -2,
        nine,
    ]


def test_a_holder_that_stands_in_the_queue_of_a_server_in_quarantine_is_no_waiter():
    record = b"1 lock 5 a:b 1000 - me/1 c"
    barred = [QUARANTINE + b"a:b", 900, record, 0, 0, 2, ME, OTHER]
    granted = [ME, 900, record, 0, 0, 1, OTHER]
    assert merged(("inspect", "1"), granted, granted, barred) == [ME, 900, record, 0, 0, 1, OTHER]
    alone = [[ME, 900, record, 0, 0, 0], [ME, 900, record, 0, 0, 0], [QUARANTINE + b"a:b", 900, record, 0, 0, 1, ME]]
    assert merged(("inspect", "1"), *alone) == [ME, 900, record, 0, 0, 0]


def test_a_handover_is_over_once_a_majority_has_confirmed_it():
    confirmed, handed_over = ([ME, 900, b"1 lock 5 a:b 1000 - me/1 c", each, 0, 0] for each in (0, 1))
    assert merged(("inspect", "1"), confirmed, handed_over, handed_over) == handed_over
    assert merged(("inspect", "1"), confirmed, confirmed, handed_over) == confirmed


def test_a_job_has_run_if_any_server_says_so():
    noted = [BUSY, b"ran/1", 5000, 0, b"17", b"18"]
    assert merged(("acquire", "me/1", *ACQUIRE[2:]), [GRANTED, 5], [GRANTED, 5], noted, script="once") == noted


@pytest.mark.parametrize(
    ("votes", "pending", "reply"),
    [
        ([[CROWDED, 2], [CROWDED, 5]], 1, None),  # the third may be the vote of a majority for a holder, with others
        ([[CROWDED, 2], [CROWDED, 5], queued(OTHER)], 0, [CROWDED, 5]),
        ([[CROWDED, 2], [CROWDED, 5], [GRANTED, 5]], 0, [CROWDED, 5]),
        ([[CROWDED, 2], queued(OTHER, 300), queued(OTHER, 500)], 0, [QUEUED, OTHER, 500, 0]),
        ([[GRANTED, 5], [CROWDED, 2], [GRANTED, 5]], 0, [GRANTED, 5]),
        ([[GRANTED, 5], [CROWDED, 2]], 0, [CROWDED, 2]),  # the third is down: nobody is there to wait for
        ([[GRANTED, 5], [CROWDED, 2], queued(QUARANTINE + b"a")], 0, [CROWDED, 2]),
        ([[CROWDED, 2], queued(QUARANTINE + b"a")], 0, [QUEUED, QUARANTINE + b"a", 500, 0]),
    ],
)
def test_a_majority_of_votes_refuses_one_more_waiter(votes, pending, reply):
    assert merged(ACQUIRE, *votes, pending=pending) == reply


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([QUEUED, QUEUED, GRANTED], GRANTED),
        ([NOT_FOUND, NOT_FOUND, QUEUED], NOT_FOUND),
        ([RETRY, QUEUED, QUEUED], QUEUED),  # one server abstains, and the lease that the others have goes on
        ([RETRY, RETRY, QUEUED], RETRY),  # only an acquire finds that the servers abstain no longer
    ],
)
def test_a_heartbeat_says_what_a_majority_knows_of_a_waiter(states, state):
    votes = [[500, b"me/1", each] for each in states]
    assert merged(("heartbeat", "-", "0", "me/1", "1000"), *votes)[2:] == [state]
