"""Revokes leases, and writes each revocation into the audit: that somebody asks, and then the result.

Rules. (a) The client sends the note that somebody asks before the revocation. If the process dies between the two, the
audit says that it asked, and no result. (b) A note that the server does not take (no right, no answer within `try_for`)
stops no revocation, since a revocation is for emergencies; the client logs a warning. (c) A revocation names the tokens
that its caller has seen, so it never takes the lease of a later holder.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Final

from interlock._client.error_texts import about
from interlock._client.inspecting import kind_of
from interlock._client.retries import Question
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log
from interlock.errors import ConfigError, LockError
from interlock.primitives.audit import (
    ASKED,
    AUDIT,
    MAX_TOKENS,
    PAGE,
    NoteCall,
    NotedCall,
    NotedReply,
    Revocation,
    fold_entries,
)
from interlock.primitives.codes import QUARANTINE
from interlock.primitives.kinds import kind_named
from interlock.primitives.messages import DoneReply, RevokeCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._client.acquiring import Core
    from interlock._protocol.resource import Resource
    from interlock.primitives.messages import BreakCall

REVOKED: Final = "revoked"
NOTHING_DONE: Final = "nothing: its holder had gone"
MAX_REASON: Final = 200  # characters
MAX_PERSON: Final = 60  # characters
MAX_TOKEN_TEXT: Final = 1000  # characters: another library may write a value of any length
_NO_TEXT: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")  # control characters, bytes of no text


def reason_text(resource: Resource, reason: object) -> str:
    """The reason for a revocation, on one line. Raises ConfigError if nothing is left of it."""
    why = _NO_TEXT.sub(" ", reason).strip()[:MAX_REASON] if isinstance(reason, str) else ""
    if not why:
        raise about(
            resource,
            ConfigError(f"{resource}: a revocation needs a reason, which its holder can read, not {reason!r}"),
        )
    return why


def revoker(core: Core, resource: Resource) -> str:
    """Who revokes, as holders and the audit read it."""
    return f"{core.process_id}/{core.caller(resource)[0]}"


class Revoking:
    """One revocation of one resource, with its notes in the audit."""

    def __init__(self, core: Core, resource: Resource, reason: str, *, force: bool, person: str = "") -> None:
        """`reason`: what `reason_text` returned. `person`: who asks, if this process serves several people."""
        self.core, self.resource, self.reason, self.force = core, resource, reason, force
        self.by = revoker(core, resource)
        if who := _NO_TEXT.sub(" ", person).strip()[:MAX_PERSON]:
            self.by = f"{who} via {self.by}"
        self._operation = f"revoke/{secrets.token_hex(16)}"
        self._is_noted = False

    @property
    def why(self) -> str:
        """What the holder reads."""
        return f"{self.reason} (by {self.by})"

    async def revoke(self, tokens: Sequence[bytes]) -> bool:
        """Revoke the leases of these holders, or end the quarantine of these markers. Returns whether any was there.

        Raises Unavailable or ConfigError.
        """
        if self.force and self.core.server.is_quorum and any(token.startswith(QUARANTINE) for token in tokens):
            raise ConfigError(
                f"{self.resource}: most servers of its quorum abstain, since they may have lost leases that are alive. "
                "That is over within max_ttl, and can't be ended for one name. If the whole quorum is new, `interlock "
                "quorum new` with its URLs ends it"
            )
        force = "1" if self.force else "0"
        return await self.send(tokens, [RevokeCall(token, force, self.why) for token in tokens])

    async def send(self, tokens: Sequence[bytes], calls: Sequence[RevokeCall | BreakCall]) -> bool:
        """Note that somebody asks, send these calls, and note the result. Returns whether any call was done."""
        if not calls:
            return False
        shown = [
            QUARANTINE.decode() if token.startswith(QUARANTINE) else token.decode(errors="replace").removeprefix("!")
            for token in tokens
        ]
        await self._note_asked(shown)
        try:
            done = [
                DoneReply.parse(await self.core.requests.query(self.resource, *call.encode())).was_done
                for call in calls
            ]
        except LockError as error:
            await self.note(f"unknown: {type(error).__name__}")
            raise
        await self.note(REVOKED if any(done) else NOTHING_DONE)
        return any(done)

    async def _note_asked(self, tokens: list[str]) -> None:
        key, name = self.resource.keys[0], self.resource.name
        fields = {
            "name": name,
            "key": key,
            "kind": self.resource.kind,
            "by": self.by,
            "reason": self.reason,
            "forced": "1" if self.force else "0",
            "holders": " ".join("_".join(token.split())[:MAX_TOKEN_TEXT] for token in tokens[:MAX_TOKENS]),
            "holding": str(len(tokens)),
        }
        self._is_noted = True
        self._is_noted = await self._write(ASKED, *(word for field in fields.items() for word in field))

    async def note(self, result: str) -> None:
        """Write the result into the audit; the last note counts."""
        if self._is_noted:
            await self._write(result)

    async def _write(self, step: str, *fields: str) -> bool:
        core, call = self.core, NoteCall(self._operation, step, fields)
        try:
            await core.requests.ask_until_answered(Question(AUDIT), call.encode(), core.runtime.now() + core.try_for)
        except LockError as error:
            log.warning(
                "%s: the audit on the server does not get this revocation (%s): %s",
                self.resource,
                step,
                error,
                extra=lock_fields(self.resource),
            )
            return False
        return True


async def value_of(core: Core, resource: Resource, token: str, *, is_revoked: bool) -> bytes:
    """What a revocation by force must name, so that it takes the lease of the holder with this token and of no other.

    Raises Unavailable or ConfigError.
    """
    if not kind_named(resource.kind).value_is_holder:
        return token.encode()
    if not core.server.is_quorum:  # a value of another library may be no text
        value = (await kind_of(core, resource.name, resource.prefix)).value
        if value.decode(errors="replace").removeprefix("!") == token:
            return value
    return (b"!" if is_revoked else b"") + token.encode()


async def audit(core: Core, name: str | None = None, most: int = PAGE) -> list[Revocation]:
    """The newest revocations, of one name or of all. Raises Unavailable or ConfigError."""
    entries = list[Any]()
    call = NotedCall()
    while True:
        reply = NotedReply.parse(await core.requests.query(AUDIT, *call.encode()))
        entries += reply.entries
        found = [each for each in fold_entries(entries) if name is None or each.name == name]
        # One more than wanted: the entries of the oldest may be on the next page.
        if len(reply.entries) < PAGE or len(found) > most:
            return found[:most]
        call = NotedCall(reply.oldest)
