"""The rules by which a quorum merges the replies about one kind: each `Kind` has them, if a quorum can agree on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.primitives.messages import AcquireReply


class QuorumRules(NamedTuple):
    """The rules of one kind."""

    release_args: tuple[str, ...]
    """The own arguments of a release by which an attempt that failed gives back the votes that it won."""
    decisive_vote: Callable[[Sequence[AcquireReply]], AcquireReply | None]
    """Returns the vote that alone decides an acquire; None if there is none."""
    parse_inspect: Callable[[Sequence[Any]], Any]
    merge_inspect: Callable[[Sequence[Any], Callable[[Sequence[Any]], Any]], Any]
    """Merges parsed replies; its second argument merges the replies of a lock."""
