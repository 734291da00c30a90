"""Several resources at once, all or none: in one step of the server if all are free, else one after another.

Theory. A client that acquires several resources waits for them in the order of their keys. All clients use this order
(the order is part of the wire format), so no circle of clients arises in which each waits for the next. A resource that
is acquired already has an ordinary lease, which the client renews while waiting for the next resource. multi.lua is the
short cut for the case that all resources are free.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from interlock._protocol.resource import Resource
from interlock.primitives.codes import GRANTED
from interlock.primitives.messages import AcquireCall, AcquireReply, Granted, Raw, Words, parse_acquire
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Sequence


def multi_resource(resources: Sequence[Resource]) -> Resource:
    """Make one resource of several: its keys are the keys of all of them."""
    names = ", ".join(resource.name for resource in resources)
    return Resource("multi", names, load("multi"), tuple(key for resource in resources for key in resource.keys))


class Part(NamedTuple):
    """The acquire of one resource: the name of its script, the number of its keys, and the call."""

    script: str
    keys: int
    call: AcquireCall


class TogetherCall(NamedTuple):
    """Acquires all resources, or none."""

    parts: Sequence[Part]

    def encode(self) -> Words:
        """See Call."""
        return ("acquire", *(json.dumps([part.script, part.keys, *part.call.encode()]) for part in self.parts))


class AllGranted(NamedTuple):
    """The server granted all resources; their grants stand in the order of the call."""

    parts: Sequence[Granted]


class FirstRefused(NamedTuple):
    """The server granted no resource: the index of the first that was not free, and the reply of its script."""

    refused_index: int
    reply: AcquireReply


def parse_together(reply: Raw) -> AllGranted | FirstRefused:
    """Parse the reply that multi.lua returned."""
    code, *rest = reply
    if code == GRANTED:
        return AllGranted([Granted(fence) for _, fence in rest])
    refused_index, refusal = rest
    return FirstRefused(refused_index, parse_acquire(refusal))
