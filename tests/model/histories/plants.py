"""Broken clients: what a worker process runs when the settings name a plant. The checker must report each."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

from interlock._api.scopes import CancelScope
from interlock._client.acquiring import Core
from interlock._client.book import Book
from interlock._client.cohort import Cohort
from interlock.fence import MAX_FENCE
from interlock.primitives import lock
from interlock.primitives import scripts as _scripts
from model.histories.store import Store

if TYPE_CHECKING:
    from interlock._client.grant import Attempt
    from interlock._protocol.resource import Script


def believes() -> None:
    """The client asks the server for a fiftieth of the ttl, and `ensure()` passes for all of it."""
    attempt = Core.attempt

    def fiftieth(self: Core, *args: Any, **kwargs: Any) -> Attempt:
        made = attempt(self, *args, **kwargs)
        made.options = copy.copy(made.options)
        made.options.ttl_ms = str(int(made.ttl * 20))
        return made

    Core.attempt = fiftieth  # type: ignore[method-assign]
    Book.add = lambda _self, _grant: None  # type: ignore[method-assign]


def shares() -> None:
    """The script grants a lock that somebody holds."""
    _change(
        "lock",
        "local holder = call('GET', LOCK)\n  kind = wanted_kind",
        "local holder\n  kind = wanted_kind",
    )


def backwards() -> None:
    """Each grant has a lower fence than the one before it."""
    lease_from_grant = Core.lease_from_grant

    def lower(self: Core, attempt: Attempt, fence: int, sent: float) -> Any:
        return lease_from_grant(self, attempt, MAX_FENCE - fence, sent)

    Core.lease_from_grant = lower  # type: ignore[method-assign]


def afterwards() -> None:
    """The deadline of a grant counts from its reply."""
    lease_from_grant = Core.lease_from_grant

    def late(self: Core, attempt: Attempt, fence: int, _sent: float) -> Any:
        return lease_from_grant(self, attempt, fence, self.runtime.now())

    Core.lease_from_grant = late  # type: ignore[method-assign]


def passes() -> None:
    """A cohort passes its lease on although it has ended."""
    Cohort.may_pass = lambda self, grant, _now: self.section is grant  # type: ignore[method-assign]


def forgets() -> None:
    """A server that may have lost leases grants at once."""
    wait = "local left_ms = math.max(0, math.ceil(since + wait + grace - get_time_us() / 1000))"
    _change("lock", wait, "local left_ms = 0")


def counts() -> None:
    """A server of a quorum counts at once, whatever it has lost."""
    _change("lock", "abstains_ms = math.max(0, since + longest - now_ms)", "abstains_ms = 0")


def unguarded() -> None:
    """The store accepts whatever it gets."""
    Store.write = lambda _self, _name, _fence: True  # type: ignore[method-assign]


def uncounted() -> None:
    """A task that was cancelled for a loss is not uncancelled: it ends with that CancelledError."""
    CancelScope.take_back = lambda _self: False  # type: ignore[method-assign]


def _change(name: str, old: str, new: str) -> None:
    real = _scripts.load

    def load(wanted: str) -> Script:
        script = real(wanted)
        if wanted != name:
            return script
        assert script.source.count(old) == 1, f"the script has changed: {old!r}"
        source = script.source.replace(old, new)
        return script._replace(source=source, sha=hashlib.sha1(source.encode()).hexdigest())

    lock.load = load  # type: ignore[attr-defined]


PLANTS = {
    each.__name__: each
    for each in (afterwards, backwards, believes, counts, forgets, passes, shares, uncounted, unguarded)
}


def plant(name: str) -> None:
    """Break this process, if a name is given."""
    if name:
        PLANTS[name]()
