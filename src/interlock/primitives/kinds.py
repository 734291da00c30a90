"""All kinds of synchronizers: the one list of them. Each record stands beside the script of its primitive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .barrier import BARRIER
from .election import ELECTION
from .latch import LATCH
from .lock import LOCK, LOCK_RULES
from .once import ONCE
from .permits import RWLOCK, SEMAPHORE

if TYPE_CHECKING:
    from interlock._protocol.resource import Script
    from interlock.primitives.kind_record import Kind
    from interlock.primitives.quorum_rules import QuorumRules

KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (LOCK, RWLOCK, SEMAPHORE, ELECTION, ONCE, LATCH, BARRIER)}
_RULES: Final = {kind.script: kind.quorum for kind in KINDS.values() if kind.quorum is not None}


def kind_named(name: str) -> Kind:
    """Return the kind of this name; that of a lock for each other word, as for a plain key or a multi."""
    return KINDS.get(name, LOCK)


def rules_of(script: Script) -> QuorumRules:
    """Return the rules by which a quorum merges replies of this script; those of a lock if no kind has the script."""
    return _RULES.get(script.name, LOCK_RULES)
