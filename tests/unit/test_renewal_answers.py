"""What one round of renewals makes of the replies (`send_renewals` of `_client/renewal.py`). The servers are stubs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from interlock._client.grant import AcquireOptions, Attempt, Hold
from interlock._client.renewal import send_renewals
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Route
from interlock.primitives.codes import GRANTED
from interlock.primitives.lock import lock_resource
from interlock.primitives.messages import RENEWED, Failed

rule = pytest.mark.rule


def hold_on(name):
    return Hold(Attempt(lock_resource(name, "lock:"), f"token-{name}", AcquireOptions(30)), f"token-{name}", 0.0, 30.0)


@rule(6)
@pytest.mark.parametrize("unknown", [[None], 7, [[]]])
def test_a_reply_that_nobody_understands_keeps_no_other_node_from_its_renewals(unknown):
    one, two, three = holds = [hold_on(name) for name in ("a", "b", "c")]

    async def call_many(messages, _until):
        return [[GRANTED], unknown, [GRANTED]][: len(messages)]

    server = SimpleNamespace(
        runtime=SimpleNamespace(now=lambda: 1.0), drift=0.0, ensure_subscribed=lambda _: None, call_many=call_many,
        route=lambda key: Route(key, 0), old_primary_may_still_grant=lambda _: False,
    )  # fmt: skip
    answers = run(send_renewals(server, holds, {}))
    (first, second, third) = answers.states
    assert (first, third) == ((one, RENEWED), (three, RENEWED))
    assert second[0] is two
    assert isinstance(second[1], Failed)
