"""What somebody else has written under a lock's key stands in an error without moving the reader's cursor."""

from __future__ import annotations

from interlock._client.error_texts import busy_error
from interlock.primitives.lock import lock_resource
from interlock.primitives.messages import Queued


def test_a_hostile_holder_begins_no_line_and_keeps_its_value():
    error = busy_error(lock_resource("a", "lock:"), 1.0, Queued(b"!evil\x1b[2J\nfake line", 5000, False))
    assert "held by evil\\x1b[2J\\nfake line, whose lease is revoked and had 5 s left" in str(error)
    assert error.holder == "evil\x1b[2J\nfake line"
