"""A server of a quorum, as one client knows it: whether it is there, what it was asked, and what it is still owed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.timing import TOMBSTONE_TTL
from interlock._protocol.types import Disconnected, Message
from interlock.primitives.codes import QUARANTINE, quarantine_evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_REMEMBERED: Final = 100_000  # tokens that are remembered of a server
TOMBSTONE_MS: Final = str(int(TOMBSTONE_TTL * 1000))


class Node:
    """One server of the quorum, as this client knows it."""

    __slots__ = (
        "absence_logged",
        "cause",
        "gone_at",
        "has_answered",
        "is_up",
        "longest_ttl",
        "pending_releases",
        "port",
        "quarantine_evidence",
        "tokens",
        "unconfirmed_releases",
    )

    def __init__(self, port: Any) -> None:
        self.port = port  # of threads or of asyncio
        self.is_up = False
        self.longest_ttl = TOMBSTONE_TTL  # seconds for which it may keep what it was asked for
        self.has_answered = False  # it has answered once
        self.cause = "not asked yet"  # why it is away
        self.gone_at = port.runtime.now()  # since when it is
        self.absence_logged = False  # whether the log says so
        self.quarantine_evidence = ""  # of what its last quarantine was the evidence
        self.tokens: dict[str, bool] = {}  # those that asked it: whether it has not answered, and may still do so
        self.unconfirmed_releases: dict[str, bool] = {}  # tokens that were given back, without an answer
        self.pending_releases: dict[
            str, tuple[Message, float]
        ] = {}  # releases that it has not got, by token, and until when

    def personalize(self, message: Message) -> Message:
        """The message as this one gets it: whether it is heard is told for each, and so is what is in doubt."""
        script, keys, args = message
        if args[0] == "acquire":
            self.tokens[str(args[1])] = True
            forget_oldest(self.tokens)
            self.longest_ttl = max(self.longest_ttl, int(args[2]) / 1000)
            return script, keys, (*args[:4], *self.port.subscription_of(keys[0]), *args[6:])
        if args[0] == "renew":  # or extend
            self.longest_ttl = max(self.longest_ttl, *(int(ms) / 1000 for ms in args[2::2]))
        if args[0] == "vouch":
            heard, channel = self.port.subscription_of(keys[0])
            return script, keys, ("vouch", channel, heard, *args[3:])
        if args[0] == "release" and self.tokens.pop(str(args[1]), False):
            return script, keys, (*args[:2], TOMBSTONE_MS, *args[3:])
        return message

    def note_replies(self, messages: Sequence[Message], replies: list[Any]) -> None:
        """What its replies tell of it."""
        for (_, _, args), reply in zip(messages, replies, strict=False):
            if args[0] == "acquire" and not isinstance(reply, Disconnected):
                if args[1] in self.tokens:
                    self.tokens[str(args[1])] = False
                if not isinstance(reply, Exception) and (evidence := quarantine_evidence(reply)):
                    self.quarantine_evidence = evidence

    def discard_unsafe(self, messages: Sequence[Message], replies: list[Any]) -> list[Any]:
        """Those that count. A release that is still on its way would free what this token is granted now."""
        if self.unconfirmed_releases:
            for i, (_, _, args) in enumerate(messages):
                if args[0] in {"acquire", "fence"} and args[1] in self.unconfirmed_releases:
                    replies[i] = Disconnected("what was given back there may still be on its way", sent=True)
        return replies

    def record_undelivered(self, messages: Sequence[Message], now: float) -> None:
        """It has not got these, or they are lost."""
        for script, keys, args in messages:
            token = str(args[1])
            if args[0] == "release":
                self.pending_releases[token] = (
                    (script, keys, (*args[:2], TOMBSTONE_MS, *args[3:])),
                    now + self.longest_ttl,
                )
                forget_oldest(self.pending_releases)


def forget_oldest(remembered: dict[str, Any]) -> None:
    with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was at it
        if len(remembered) > MAX_REMEMBERED:
            del remembered[next(iter(remembered))]


def is_quarantine(value: bytes) -> bool:
    return value.startswith(QUARANTINE)


def own_marker(args: Sequence[Any], seen: Any) -> bytes:
    """What a server that says this when inspected calls its quarantine, or the note of a run; b"" if it has none."""
    if args[0] == "forget":
        note: bytes = seen[1]
        return note if note.split(b" ")[0] == args[1].split(b" ")[0] else b""
    value: bytes = seen[0][0] if isinstance(seen[0], list) else seen[0]
    return value if is_quarantine(value) else b""
