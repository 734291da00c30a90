"""Several things at once, all or none: in one step of the server if they are free, else one after another.

Theory. Whoever wants several waits for them in the order of their keys. All who do so agree on that order (it is
part of the wire format), so there is no circle in which each waits for the next. Those already had are leases like
any other, renewed while the next is awaited. multi.lua is the short cut for when nothing is busy.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from interlock._protocol.types import Resource
from interlock.primitives.codes import GRANTED
from interlock.primitives.messages import AcquireCall, AcquireReply, Granted, Raw, Words, parse_acquire
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Sequence


def multi_resource(primitives: Sequence[Resource]) -> Resource:
    """All of them, as one."""
    names = ", ".join(resource.name for resource in primitives)
    return Resource("multi", names, load("multi"), tuple(key for each in primitives for key in each.keys), ())


class Part(NamedTuple):
    """The acquire of one of them: its script, how many keys that has, and the call."""

    script: str
    keys: int
    call: AcquireCall


class TogetherCall(NamedTuple):
    """Acquires all of them, or none."""

    parts: Sequence[Part]

    def encode(self) -> Words:
        """See Call."""
        return ("acquire", *(json.dumps([part.script, part.keys, *part.call.encode()]) for part in self.parts))


class AllGranted(NamedTuple):
    """All of them were granted, in the order of the call."""

    parts: Sequence[Granted]


class FirstRefused(NamedTuple):
    """None was granted: the first that was not free, from 0, and the reply of its script."""

    which: int
    reply: AcquireReply


def parse_together(reply: Raw) -> AllGranted | FirstRefused:
    """The reply that multi.lua returned."""
    code, *rest = reply
    if code == GRANTED:
        return AllGranted([Granted(fence) for _, fence in rest])
    which, refusal = rest
    return FirstRefused(which, parse_acquire(refusal))
