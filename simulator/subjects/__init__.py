"""What is simulated: every kind of primitive is a subject, in a file of its own.

A subject says what its clients do (`turn`: drawn by chance, told as text, played by a worker through asyncio's own API)
and what must hold (`resource`: how the server's keys are read, who may have it beside whom). The rest serves all.

To add one: a subclass of `Subject` with a `ResourceModel` of its own or another's, and a line here.
"""

from __future__ import annotations

from typing import Final

from simulator.profiles import PROFILES, WORLDS

from .barrier import BarrierSubject
from .election import ElectionSubject
from .latch import LatchSubject
from .lock import LockSubject
from .multi import MultiSubject
from .once import OnceSubject
from .rlock import RLockSubject
from .rwlock import RWLockSubject
from .semaphore import SemaphoreSubject
from .subject import Reading, ResourceModel, Share, Subject, Turn

__all__ = ["SUBJECTS", "Reading", "ResourceModel", "Share", "Subject", "Turn", "subject_of"]

SUBJECTS: Final[dict[str, type[Subject]]] = {
    subject.kind: subject
    for subject in (
        LockSubject,
        RLockSubject,
        SemaphoreSubject,
        RWLockSubject,
        MultiSubject,
        ElectionSubject,
        OnceSubject,
        LatchSubject,
        BarrierSubject,
    )
}
_TURNS_BESIDE_LOCK: Final = [
    kind for kind, subject in SUBJECTS.items() if kind != "lock" for _ in range(subject.seed_share)
]


# LatchSubject and barriers have no leases that a server could lose.
_SUBJECTS_OF_WORLD: Final = {
    "servers": ("lock", "rlock", "rwlock", "semaphore", "election", "once", "multi"),
    "quorum": ("lock", "rlock", "election", "once", "multi"),
}


def subject_of(seed: int, world: str = "one") -> str:
    """The subject that a seed chooses by itself: of five rounds of all profiles two are the lock's, whatever joins."""
    if world in _SUBJECTS_OF_WORLD:
        return _SUBJECTS_OF_WORLD[world][seed // len(WORLDS[world]) % len(_SUBJECTS_OF_WORLD[world])]
    fives, position = divmod(seed // len(PROFILES), 5)
    return "lock" if position % 2 else _TURNS_BESIDE_LOCK[(3 * fives + position // 2) % len(_TURNS_BESIDE_LOCK)]
