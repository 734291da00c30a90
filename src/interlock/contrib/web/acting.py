"""Revoking from the page, by the same rules as `interlock revoke`: the audit has who, whom, when and why.

Rules. (a) A revocation names the holders that the person has seen, so it never takes the lease of one that came later.
(b) The first revocation asks the holder. Force is a second decision of the person, who reads first what may happen.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from interlock._client.inspecting import inspect
from interlock._people.revocation import Revoking, reason_text, value_of
from interlock._people.views import MOST, Name
from interlock.errors import ConfigError
from interlock.primitives.codes import PLAIN
from interlock.primitives.kind import resource_of
from interlock.primitives.kinds import KINDS, kind_named
from interlock.primitives.messages import BreakCall

if TYPE_CHECKING:
    from interlock._protocol.resource import Resource
    from interlock._session.session import Session

MAX_HOLDERS: Final = 100  # that one revocation names


@dataclass(frozen=True)
class Wanted:
    """What a person asks for."""

    name: Name
    tokens: tuple[str, ...]
    reason: str
    force: bool

    @classmethod
    def parse(cls, body: bytes) -> Wanted:
        """Parse a request. Raises ConfigError."""
        try:
            fields: Any = json.loads(body)
            name = Name(fields["kind"], fields["name"], fields["prefix"])
            tokens = tuple(cast("list[object]", fields["tokens"]))
            if not all(isinstance(each, str) for each in (*name, *tokens)) or len(tokens) > MAX_HOLDERS:
                raise TypeError
            wanted = cls(name, cast("tuple[str, ...]", tokens), fields["reason"], fields["force"] is True)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError("a revocation needs kind, name, prefix, tokens, reason and force, as JSON") from error
        if name.kind not in {*KINDS, PLAIN}:
            raise ConfigError(f"there is no kind {name.kind!r} that could be revoked")
        return wanted


async def revoke(session: Session, wanted: Wanted, person: str) -> str:
    """Revoke as this person wants. Returns the result, in words for the person. Raises Unavailable or ConfigError."""
    kind, name, prefix = wanted.name
    resource = resource_of(kind, name, prefix)
    reason = reason_text(resource, wanted.reason)
    revoking = Revoking(session.core, resource, reason, force=wanted.force, person=person)
    if not kind_named(kind).has_holders:
        call = BreakCall(f"revoke/{secrets.token_hex(16)}", f"it was revoked: {revoking.why}")
        done = await revoking.send([], [call])
        return "It is broken, and those who waited for it know so" if done else "There is nothing to break any more"
    if not wanted.tokens:
        return await _end_quarantine(session, resource, revoking)
    if kind == PLAIN and not wanted.force:
        raise ConfigError("a client of another library can't be asked. If nobody is at work there, take it by force")
    view = await session.views.glance(session.core, name, prefix, MOST)
    held = {holder.token: holder for holder in view.holders}
    seen = [held[token] for token in wanted.tokens if token in held]
    values = [each.token.encode() for each in seen]
    if wanted.force:
        values = [
            await value_of(session.core, resource, each.token, is_revoked=each.revoked is not None) for each in seen
        ]
    elif seen and all(each.revoked is not None for each in seen):
        return "Its holder has been asked before, and still holds it"
    if not await revoking.revoke(values):
        return "Its holder had gone before, so nobody was revoked"
    if wanted.force:
        return "It was taken. Its former holder may still be at work"
    return "Its holder was asked to give it back, and can renew it no more"


async def _end_quarantine(session: Session, resource: Resource, revoking: Revoking) -> str:
    if not revoking.force:
        raise ConfigError("nobody is known to hold it: only force ends a quarantine")
    marker = kind_named(resource.kind).marker_in(await inspect(session.core, resource, "1"))
    if not marker or not await revoking.revoke([marker]):
        return "There is no quarantine any more"
    return "Its quarantine has been ended"
