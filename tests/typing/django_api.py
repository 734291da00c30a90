"""What type checkers say of the locks of a Django project: never run, but checked by `scripts/check`."""

from __future__ import annotations

from typing import assert_type

from interlock import Interlock, Lease, Lock
from interlock import aio as ilock
from interlock.contrib.django import alocks, locks, name_of
from interlock.contrib.django.transactions import UntilCommit

assert_type(locks.lock("a", timeout=5), Lock)
assert_type(locks["other"].lock("a"), Lock)
assert_type(locks.lock("a", until_commit=True, using="default", ttl=5), UntilCommit)
assert_type(name_of("a"), str)
as_an_interlock: Interlock = locks

with locks.lock("a", until_commit=True) as until_commit:
    assert_type(until_commit, Lease)


@locks.lock("a", until_commit=True)
def under_a_lock(x: int) -> str:
    """Until the commit."""
    return str(x)


assert_type(under_a_lock(1), str)


async def view() -> None:
    """With asyncio."""
    async with alocks.lock("a", timeout=5) as lease:
        assert_type(lease, ilock.Lease)
