"""The answer to a request whose lock is busy, lost or unavailable: one for every web framework.

Theory. `answer_to(error)` is a pure function, and knows no framework: a status, headers, and a problem document (RFC
9457, `application/problem+json`). Its text is the `public_text` of the error.

Rules. (a) An answer names the lock, and no host, process, token, address or line of code. (b) Only the errors in
`ANSWERED` are answers: the others (`ConfigError`, `Deadlock`, `NotHeld`) are errors of the program, which its framework
should log and answer as it does every other one. (c) An answer invites a client to repeat a request (`Retry-After`)
only if the request did nothing: not after a lost lease, whose work may be half done.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal

from interlock.errors import AcquireTimeout, BrokenBarrier, LeaseLost, LockError, Unavailable

__all__ = ["ANSWERED", "Answer", "answer_to", "retry_after"]

MEDIA_TYPE: Final = "application/problem+json"
LONGEST_RETRY_AFTER: Final = 60  # seconds
ANSWERED: Final = (AcquireTimeout, Unavailable, LeaseLost, BrokenBarrier)
"""The errors that a client of a web application may meet though the program is right."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a web application sends: the status, the headers but for the length, and the body, which is JSON."""

    status: int
    headers: dict[str, str]
    body: bytes


def answer_to(error: LockError, *, busy: Literal[423, 409] = 423) -> Answer:
    """Return the answer to a request that this error ended.

    `busy` is the status while somebody else holds the lock: 423 (Locked) or 409 (Conflict), for clients or proxies that
    do not know 423. A server that does not answer, a lease that was lost and a broken barrier are 503; any other error
    is one of the program, and 500.
    """
    status = HTTPStatus(_status_of(error, busy))
    problem: dict[str, object] = {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "detail": error.public_text,
    }
    headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store"}
    if error.name is not None:
        problem["lock"] = error.name
    if (seconds := retry_after(error)) is not None:
        headers["Retry-After"] = str(seconds)
    return Answer(status.value, headers, json.dumps(problem).encode())


def retry_after(error: LockError) -> int | None:
    """Whole seconds, from 1 to 60, after which the client may try again; None if it should not by itself.

    The server knows when the holder's lease ends if nobody renews it, and a living holder does renew it. So the client
    waits no longer than until that end, and about as long as its request has waited already: clients whose requests
    wait longer come back less often. A quarantine ends at a known time, and not before.
    """
    if isinstance(error, AcquireTimeout):
        if error.quarantined and error.remaining is not None:
            return _whole(error.remaining)
        return _whole(error.waited if error.remaining is None else min(error.waited, error.remaining))
    return _whole(error.waited) if isinstance(error, Unavailable) else None


def _whole(seconds: float) -> int:
    return max(1, math.ceil(min(seconds, LONGEST_RETRY_AFTER)))


def _status_of(error: LockError, busy: int) -> int:
    if isinstance(error, AcquireTimeout):
        return busy
    return 503 if isinstance(error, ANSWERED) else 500
