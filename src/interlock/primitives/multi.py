"""Several things at once, all or none: in one step of the server if they are free, else one after another.

Theory. Whoever wants several waits for them in the order of their keys. All who do so agree on that order (it is
part of the wire format), so there is no circle in which each waits for the next. Those already had are leases like
any other, renewed while the next is awaited. multi.lua is the short cut for when nothing is busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock._protocol.types import Resource
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Sequence


def multi_resource(primitives: Sequence[Resource]) -> Resource:
    """All of them, as one."""
    names = ", ".join(resource.name for resource in primitives)
    return Resource("multi", names, load("multi"), tuple(key for each in primitives for key in each.keys), ())
