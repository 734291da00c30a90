"""The names that processes hold or wait for, for the user who presses Tab: soon, or none."""

from __future__ import annotations

import contextlib
import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Final

from interlock import embedded
from interlock.cli.options import connect
from interlock.cli.output import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["names"]

WITHIN: Final = 0.5  # seconds for the server
_EMBEDDED: Final = "embedded://"


def names(urls: Sequence[str], prefix: str) -> list[tuple[str, str]]:
    """The names under this prefix, each with what its processes do. None after `WITHIN`, or after any error."""
    import_module("redis")  # what the first Interlock imports: it takes long, and does not count

    found = list[tuple[str, str]]()

    def ask() -> None:
        with contextlib.suppress(Exception):
            found.extend(_listed(urls, prefix))

    # A daemon, which nobody waits for: the process ends when the answer is printed.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(WITHIN)
    return list(found)


def _listed(urls: Sequence[str], prefix: str) -> list[tuple[str, str]]:
    urls = urls or [os.environ.get("INTERLOCK_URL", "")]
    if any(url.startswith(_EMBEDDED) for url in urls) and embedded.shared_status(timeout=WITHIN) is None:
        return []  # a Tab starts no server
    locks = connect(urls, prefix)
    listed = {
        each.name: f"{each.kind}: {len(each.holders)} hold, {len(each.waiters)} wait"
        for each in locks.ls()
        if each.prefix == prefix
    }
    # A name with a control character reaches no terminal, and one with a dash would be an option.
    return [(name, text) for name, text in sorted(listed.items()) if safe(name) == name and not name.startswith("-")]
