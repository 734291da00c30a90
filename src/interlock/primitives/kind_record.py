"""What code that serves every kind of synchronizer asks about one kind. Each primitive answers beside its script.

Rule. Code outside of a primitive's own files knows no kind by name: it reads a field of the kind's record. `kinds.py`
lists the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock._protocol.resource import Resource
    from interlock.primitives.messages import Raw
    from interlock.primitives.quorum_rules import QuorumRules
    from interlock.primitives.view import View


def nothing_in(_reply: Raw) -> bytes:
    """Return b"": a reply to `inspect` of such a kind has no record, or no marker."""
    return b""


class Kind(NamedTuple):
    """One kind of synchronizer."""

    name: str
    """The second word of its records; also what logs, metrics and the command line call it."""
    phrase: str
    """The name with its article, for messages."""
    script: str
    """The name of the script that decides about it."""
    make: Callable[[str, str], Resource]
    """Makes the resource of a name and a prefix, for `inspect` and `revoke` only: so what it would grant is no
    matter. Raises ConfigError."""
    add_to_view: Callable[[View, Raw], View]
    """Adds to the view of a name what a reply to `inspect` says."""
    self_wait_advice: str = ""
    """The way out for a caller that waits for what it holds itself."""
    record_in: Callable[[Raw], bytes] = nothing_in
    """Returns the record in a reply to `inspect`; b"" if the script refuses the records of other kinds itself."""
    marker_in: Callable[[Raw], bytes] = nothing_in
    """Returns the marker of a quarantine in a reply to `inspect`; b"" if there is no quarantine."""
    quorum: QuorumRules | None = None
    """How a quorum merges the replies; None: the servers of a quorum can't agree on it."""
    has_holders: bool = True
    """Whether somebody holds it; else a revocation breaks it for all that wait."""
    becomes_free: bool = True
    """Whether a person can wait until it is free."""
    holds_end: bool = True
    """Whether a holder is expected to give it back soon; else nobody that waits for it is stuck."""
    value_is_holder: bool = True
    """Whether the key has the value of its one holder, so that a revocation names this value; else it names a token."""
    may_join_multi: bool = False
    """Whether multi.lua runs its script."""
    mismatch: tuple[str, str] = ("", "")
    """The option that all callers must give alike, and the way out for a caller that gives another value."""
    broken_advice: str = ""
    """The way out for a caller that finds it broken."""
    short: str = ""
    """The name in a narrow column; "": as `name`."""
