"""What tokens say. Each begins with the process of an attempt, or with the owner before that: see Core.attempt.

A text counts as a token only if all of it is one. What other libraries write says nothing: not even a host is read
out of it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_PROCESS: Final = r"(?:([\w.@-]+)@)?([\w.-]+)/(\d{1,10})"
_TOKEN: Final = re.compile(rf"(?:([\w.@-]+)~[0-9a-f]{{16}}/)?({_PROCESS})/([\w.@-]+)/[0-9a-f]{{32}}", re.ASCII)
_PROCESS_ALONE: Final = re.compile(_PROCESS, re.ASCII)


class Process(NamedTuple):
    """A process, as a client in it calls it."""

    label: str
    """The `label` of its Interlock; "" if that has none."""
    host: str
    pid: int

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Parse the text of a process."""
        words = _PROCESS_ALONE.fullmatch(text)
        return cls(words[1] or "", words[2], int(words[3])) if words is not None else None

    def __str__(self) -> str:
        return f"{self.label}@{self.host}/{self.pid}".removeprefix("@")


class Token(NamedTuple):
    """What one token says."""

    owner: str
    """The `owner` of an rlock, as far as a token can name it; "" if it has none."""
    process: Process
    caller: str
    """The name of the thread or task."""

    @classmethod
    def parse(cls, text: str) -> Token | None:
        """Parse the text of a token."""
        words = _TOKEN.fullmatch(text)
        if words is None:
            return None
        owner, _, label, host, pid, caller = words.groups()
        return cls(owner or "", Process(label or "", host, int(pid)), caller)
