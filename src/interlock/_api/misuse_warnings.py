"""Warnings of what looks like a mistake in a program, though it may be meant: each one is a function here.

`misuse_errors` has the errors for what can't be meant. A caller that waits for a lease of its own is logged in
`_client`, which finds that out: see `_client/self_wait.py`. What is wrong with a server is logged in `_connect`.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
import warnings
from datetime import UTC, datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from interlock._client.places import NOT_THE_USERS, calling_place, line_of
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log

if TYPE_CHECKING:
    from types import FrameType

    from interlock._protocol.resource import Resource

_NO_VARIABLE: Final = object  # in place of the value: a class, so no warning follows
DAYS: Final = ("%Y-%m-%d", "%Y%m%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y-%m", "%G-W%V")
_TIMESTAMP: Final = re.compile(r"(?<!\d)\d{10}(?=\.|$)")
DAY: Final = 86_400  # seconds
STALE_AFTER: Final = 3600.0  # seconds: a program that runs on for so long after its decorator is one that stays


def warn_of_dropped_lease(lease: Any, text: str) -> None:
    """Warn, in the finalizer of a lease, that nobody released the lease. `LeaseEnds.end_orphans` logs the same text."""
    warnings.warn(text, ResourceWarning, source=lease, stacklevel=3)


_warned_lines: set[tuple[str, str]] = set()  # which warning, and the line of the user's code, or the server


def _is_first_at(warning: str, line: str) -> bool:
    """Whether this is the first such warning for this line. Notes that it was given."""
    if (warning, line) in _warned_lines:
        return False
    _warned_lines.add((warning, line))
    return True


_FIELD: Final = re.compile(r"\{([^\W\d]\w*)[^{}]*\}")  # as in an f-string: a variable, and what may follow


def warn_of_missing_f(subject: Resource, text: str) -> None:
    """Log, once a line, that a name has a variable of its caller in braces: `lock("cart:{user}")` without the `f`.

    All callers would share that lock. A hash tag of a cluster looks the same. So this warns of a tag only if it is the
    name of a variable there, and the value of that is no module, is not callable, and does not stand in the name, too.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and NOT_THE_USERS[frame.f_code.co_filename]:
        frame = frame.f_back
    if frame is None:
        return
    for field in _FIELD.finditer(text):
        value = frame.f_locals.get(field[1], frame.f_globals.get(field[1], _NO_VARIABLE))
        if callable(value) or isinstance(value, ModuleType):
            continue
        if re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", text.replace(field[0], "")):
            continue
        line = line_of((frame.f_code, frame.f_lasti))
        if _is_first_at("f", line):
            log.warning(
                "%s: %s stands in the text as it is, at %s, where %r is a variable: so all calls share one name. Write "
                'f"%s"; or, if it is meant as the hash tag of a cluster, give the tag another name than the variable',
                subject,
                field[0],
                line,
                field[1],
                text,
                extra=lock_fields(subject),
            )


def warn_of_none(subject: object, what: str, field: str, text: str, called: str) -> None:
    """Log, once a line, that a field of a format is None in a call: all such calls share one name or key."""
    line = line_of(calling_place())
    if _is_first_at("None", line):
        log.warning(
            "%s: %r is None in a call of %s at %s, so %s is %r, as in each such call: they share one lock. Give a "
            "value, or refuse None before the call; a function in place of the format may make another name of None",
            subject,
            field,
            called,
            line,
            what,
            text,
            extra={"lock": text, "kind": "lock", "fence": None, "token": None},
        )


def warn_of_many_interlocks(url: str, number: int) -> None:
    """Log, once for each server, that this many Interlocks of this process use it."""
    if _is_first_at("many", url):
        log.warning(
            "%d Interlocks of this process use %s and were not closed; the last was made at %s. Each has connections, "
            "and up to seven threads, until it is closed. Make one for the program, which all threads and tasks share; "
            "or hold it in a `with`, whose end closes it",
            number,
            url,
            line_of(calling_place()),
            extra={"lock": None, "kind": None, "fence": None, "token": None},
        )


_has_warned_of_loop = threading.Event()  # once a process


def warn_of_blocked_loop(resource: Resource) -> None:
    """Log, once a process, that a call for threads runs inside an event loop."""
    if not _has_warned_of_loop.is_set():
        _has_warned_of_loop.set()
        log.warning(
            "%s: a call for threads runs inside an event loop, at %s. The loop and all its tasks stand still until it "
            "returns. Use interlock.aio there, or asyncio.to_thread()",
            resource,
            line_of(calling_place()),
            extra=lock_fields(resource),
        )


@functools.lru_cache(maxsize=1024)
def warn_of_work_after_release(subject: Resource, text: str) -> None:
    """Log, once for each text, that a decorated function returned what does its work after the release."""
    log.warning("%s", text, extra=lock_fields(subject))


class FrozenText:
    """A name or key, made once when the decorator of `called` ran, that has the date or time of that moment.

    `@locks.once("nightly", key=str(date.today()), ...)` runs on the day on which the program starts, and is skipped on
    all later days. That is right in a program that cron starts each night, and that ends. So each call looks: a call on
    another day, or an hour after the decorator ran, is one of a program that stays.
    """

    def __init__(self, subject: Resource, what: str, text: str, called: str) -> None:
        self._words = subject, what, text, called
        self._made, self._is_quiet = time.time(), not _is_of_now(text)

    def warn_if_stale(self) -> None:
        """Log, once, that the text stays the same while the program runs on."""
        subject, what, text, called = self._words
        if self._is_quiet or (abs(time.time() - self._made) < STALE_AFTER and _is_of_now(text)):
            return
        self._is_quiet = True
        log.warning(
            "%s: %s %r has the date or time at which the decorator of %s ran, and this program runs on. The text stays "
            "the same until the program starts again, and later runs are skipped. To make one for each call, give a "
            "function: key=lambda: str(date.today()). If it is meant to stay, ignore this warning",
            subject,
            what,
            text,
            called,
            extra=lock_fields(subject),
        )


def _is_of_now(text: str) -> bool:
    here, utc = datetime.now().astimezone(), datetime.now(UTC)
    forms = {now.strftime(form) for form in DAYS for now in (here, utc)}
    if any(re.search(rf"(?<!\d){re.escape(form)}(?![\d-])", text) for form in forms):
        return True
    return any(abs(int(found) - time.time()) < DAY for found in _TIMESTAMP.findall(text))
