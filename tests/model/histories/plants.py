"""Broken clients: what a worker process runs when the settings name a plant. The checker must report each."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

from interlock import aio
from interlock._client.core import Core
from interlock._client.renewal import Renewal
from interlock.primitives import lock
from interlock.primitives import scripts as _scripts

if TYPE_CHECKING:
    from interlock._client.grant import Attempt
    from interlock._protocol.types import Script


def believes() -> None:
    """The server is asked for a tenth of the ttl, and `ensure()` passes for all of it."""
    attempt = Core.attempt

    def tenth(self: Core, *args: Any, **kwargs: Any) -> Attempt:
        made = attempt(self, *args, **kwargs)
        made.options = copy.copy(made.options)
        made.options.ttl_ms = str(int(made.ttl * 100))
        return made

    Core.attempt = tenth  # type: ignore[method-assign]
    Renewal.add = lambda _self, _grant: None  # type: ignore[method-assign]


def shares() -> None:
    """The script grants a lock that somebody holds."""
    _change(
        "lock",
        "local holder = call('GET', LOCK)\n  kind = wanted_kind",
        "local holder\n  kind = wanted_kind",
    )


def uncounted() -> None:
    """A task that was cancelled for a loss is not uncancelled."""
    real = aio.Lease.__aexit__

    async def leave(self: Any, *error: Any) -> None:
        self._cancelled = False
        await real(self, *error)

    aio.Lease.__aexit__ = leave  # type: ignore[method-assign]


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


PLANTS = {each.__name__: each for each in (believes, shares, uncounted)}


def plant(name: str) -> None:
    """Break this process, if a name is given."""
    if name:
        PLANTS[name]()
