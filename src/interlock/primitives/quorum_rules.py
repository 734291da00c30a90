"""The rules by which a quorum merges the replies about each primitive, by the name of its script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock.primitives import once
from interlock.primitives.lock import LockInspect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._protocol.types import Script
    from interlock.primitives.messages import AcquireReply


class QuorumRules(NamedTuple):
    """The rules of one primitive."""

    release_args: tuple[str, ...]
    """What a release carries beside what all carry, if an attempt gives back the votes that it won at some servers."""
    decisive_vote: Callable[[Sequence[AcquireReply]], AcquireReply | None]
    """Returns the vote that alone decides an acquire; None if there is none."""
    parse_inspect: Callable[[Sequence[Any]], Any]
    merge_inspect: Callable[[Sequence[Any], Callable[[Sequence[LockInspect]], LockInspect]], Any]
    """Merges parsed replies; its second argument merges the replies of a lock."""


def _no_decisive_vote(_votes: Sequence[AcquireReply]) -> None:
    return None


def _merge_lock(replies: Sequence[LockInspect], merge: Callable[[Sequence[LockInspect]], LockInspect]) -> LockInspect:
    return merge(replies)


_LOCK_RULES: Final = QuorumRules((), _no_decisive_vote, LockInspect.parse, _merge_lock)
_OTHER_RULES: Final = {
    "once": QuorumRules(once.NO_NOTE, once.decisive_vote, once.OnceInspect.parse, once.merge_inspect),
}


def rules_of(script: Script) -> QuorumRules:
    """Return the rules of the primitive about which this script decides."""
    return _OTHER_RULES.get(script.name, _LOCK_RULES)
