"""Which stragglers of a server of a quorum are read before the next round: see `Node.take_arrived`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from interlock._servers.quorum_nodes import Node
from interlock._servers.single import SentBatch
from interlock._transports.connections import PendingReplies

BY_ITSELF, IN_THREADS = -1, 7  # file numbers


def straggler(fileno, *, until=100.0, replies=0):
    pending = PendingReplies(1, fileno)
    for _ in range(replies):
        pending.set_result([1, 5])
    return SentBatch((), (), until, None, pending), ()


@pytest.fixture
def node():
    return Node(SimpleNamespace(runtime=SimpleNamespace(now=lambda: 0.0)))


def test_replies_that_arrive_by_themselves_are_looked_for_in_their_order(node):
    """With a hundred tasks a round would else look at the batches of all others."""
    first, second, third = straggler(BY_ITSELF, replies=1), straggler(BY_ITSELF), straggler(BY_ITSELF, replies=1)
    node.stragglers.extend([first, second, third])
    assert [*node.take_arrived(1.0)] == [first]
    assert [*node.stragglers] == [second, third]
    second[0].pending.set_result([1, 5])
    assert [*node.take_arrived(1.0)] == [second, third]
    assert not node.stragglers


def test_a_straggler_whose_time_is_over_keeps_no_other_waiting(node):
    late, arrived = straggler(BY_ITSELF, until=0.5), straggler(BY_ITSELF, replies=1)
    node.stragglers.extend([late, arrived])
    assert [*node.take_arrived(1.0)] == [late, arrived]


def test_threads_look_at_each_connection(node):
    each = [straggler(IN_THREADS), straggler(IN_THREADS)]
    node.stragglers.extend(each)
    assert [*node.take_arrived(1.0)] == each
    assert [*node.take_stragglers()] == []
