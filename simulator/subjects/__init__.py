"""What is simulated: every kind of primitive is a subject, in a file of its own.

A subject says what its clients do (`turn`: drawn by chance, told as text, played by a worker through asyncio's own API)
and what must hold (`resource`: how the server's keys are read, who may have it beside whom). The rest serves all.

To add one: a subclass of `Subject` with a `ResourceModel` of its own or another's, and a line here.
"""

from __future__ import annotations

from typing import Final

from simulator.profiles import PROFILES, WORLDS

from .barrier import Barriers
from .election import Elections
from .latch import Latches
from .lock import Locks
from .multi import Multis
from .once import Onces
from .rlock import RLocks
from .rwlock import RWLocks
from .semaphore import Semaphores
from .subject import Reading, ResourceModel, Share, Subject, Turn

__all__ = ["SUBJECTS", "Reading", "ResourceModel", "Share", "Subject", "Turn", "subject_of"]

SUBJECTS: Final[dict[str, type[Subject]]] = {
    subject.kind: subject
    for subject in (Locks, RLocks, Semaphores, RWLocks, Multis, Elections, Onces, Latches, Barriers)
}
_OTHERS: Final = [kind for kind, subject in SUBJECTS.items() if kind != "lock" for _ in range(subject.seed_share)]


# Latches and barriers have no leases that a server could lose.
_IN: Final = {
    "servers": ("lock", "rlock", "rwlock", "semaphore", "election", "once", "multi"),
    "quorum": ("lock", "rlock", "election", "once", "multi"),
}


def subject_of(seed: int, world: str = "one") -> str:
    """The subject that a seed chooses by itself: of five rounds of all profiles two are the lock's, whatever joins."""
    if world in _IN:
        return _IN[world][seed // len(WORLDS[world]) % len(_IN[world])]
    fives, place = divmod(seed // len(PROFILES), 5)
    return "lock" if place % 2 else _OTHERS[(3 * fives + place // 2) % len(_OTHERS)]
