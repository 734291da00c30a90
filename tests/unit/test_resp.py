"""The packing of script calls: most of a message that differs only in its token from an earlier one is packed once."""

from __future__ import annotations

import pytest

from interlock._transports.resp import evalsha, pack, stamped, unstamped
from interlock.primitives.lock import lock_resource
from interlock.primitives.messages import encode_acquire, encode_release
from interlock.primitives.multi import multi_resource
from interlock.primitives.permits import semaphore_resource

LOCK, OTHER, PERMITS = lock_resource("a", "lock:"), lock_resource("ä", "lock:"), semaphore_resource("a", "lock:", 3)
CALLS = [
    (resource, args)
    for resource in (LOCK, OTHER, PERMITS)
    for token in ("host/1/MainThread/00", "host/1/MainThread/01", "höst/22/T/02", "")
    for args in (
        encode_acquire(token, "30000", "3000", "0", "interlock:01", "inf", resource.acquire_args),
        encode_acquire(token, "30000", "3000", "1", "interlock:01", "0", resource.acquire_args),
        encode_release(token, "0", ()),
        encode_release(token, "60000", ()),
        ("release", token.encode(), "0"),
        ("renew", token, "30000"),
        ("execute", token, "SET", "k", b"\xff\0"),
    )
]
CALLS += [(multi_resource([LOCK, OTHER]), ("acquire", f'["{token}"]', "2")) for token in ("x", "y")]


@pytest.mark.parametrize("stamp", ["", "0123:01 60000 0 -", "ä+ 30000"])
def test_each_message_has_its_own_words(stamp):
    for _ in range(2):
        for resource, args in CALLS:
            whole = ("EVALSHA", resource.script.sha, str(len(resource.keys)), *resource.keys, *args, stamp)
            assert evalsha(resource.script, resource.keys, args, stamp) == pack(whole)
            assert stamped(unstamped(resource.script, resource.keys, args), stamp) == pack(whole)
