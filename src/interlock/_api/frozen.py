"""A name or key that was made once, when a decorator ran, though each call was meant to make its own.

`@locks.once("nightly", key=str(date.today()), ...)` runs on the day on which the program starts, and is skipped on all
later days. A text that is meant to stay, such as the version of a migration, looks the same. So what looks like this
very moment is only warned about: an error would depend on the day on which somebody starts a program.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log

from .functions import name_of

if TYPE_CHECKING:
    from interlock._protocol.types import Resource

DAYS: Final = ("%Y-%m-%d", "%Y%m%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y-%m", "%G-W%V")
_TIMESTAMP: Final = re.compile(r"(?<!\d)\d{10}(?=\.|$)")
DAY: Final = 86_400  # seconds


def warn_of_frozen(subject: Resource, what: str, text: str, function: object) -> None:
    """Log a warning if this name or key of a decorated function has the date or time of now in it."""
    if not _is_of_now(text):
        return
    log.warning(
        "%s: %s %r has the date or time of now, and was made once, when the decorator of %s ran. So it stays the same "
        "until the program starts again, and later runs are skipped. To make one for each call, give a function: "
        "key=lambda: str(date.today()). If it is meant to stay, ignore this warning",
        subject,
        what,
        text,
        name_of(function),
        extra=lock_fields(subject),
    )


def _is_of_now(text: str) -> bool:
    here, utc = datetime.now().astimezone(), datetime.now(UTC)
    forms = {now.strftime(form) for form in DAYS for now in (here, utc)}
    if any(re.search(rf"(?<!\d){re.escape(form)}(?![\d-])", text) for form in forms):
        return True
    return any(abs(int(found) - time.time()) < DAY for found in _TIMESTAMP.findall(text))
