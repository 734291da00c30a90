"""What a run simulates: every kind of primitive is a subject, in a file of its own.

A subject has two halves. Its *turns* are the actions of workers: `Subject.turn` draws all random choices of a turn,
`str(turn)` describes the turn in the trace, and `Turn.play` performs it through the public API for asyncio. Its
*resource models* read the keys of a resource in the server, and say which rules that resource must keep. Everything
else in the simulator is the same for all subjects.

To add a subject, write a subclass of `Subject` with a subclass of `ResourceModel`, and name the former here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from simulator.profiles import ALL, EVERY, PROFILES, WORLDS, profile_of

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

if TYPE_CHECKING:
    from collections.abc import Collection

    from simulator.profiles import Profile

__all__ = [
    "SUBJECTS", "Reading", "ResourceModel", "Share", "Subject", "Turn", "choices_of", "subject_of", "subjects_of",
]  # fmt: skip

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


# Latches and barriers are missing here: they have no leases, so a restarted server can lose none.
_SUBJECTS_OF_WORLD: Final = {
    "servers": ("lock", "rlock", "rwlock", "semaphore", "election", "once", "multi"),
    "quorum": ("lock", "rlock", "election", "once", "multi"),
}


def subject_of(seed: int, world: str = "one") -> str:
    """Return the subject that the seed chooses.

    In each five rounds through all profiles the lock gets two rounds, so new subjects do not change the lock's seeds.
    """
    if world == EVERY:
        return _subject_under(seed // len(ALL), profile_of(seed, EVERY))
    if world in _SUBJECTS_OF_WORLD:
        return _SUBJECTS_OF_WORLD[world][seed // len(WORLDS[world]) % len(_SUBJECTS_OF_WORLD[world])]
    fives, position = divmod(seed // len(PROFILES), 5)
    return "lock" if position % 2 else _TURNS_BESIDE_LOCK[(3 * fives + position // 2) % len(_TURNS_BESIDE_LOCK)]


def subjects_of(world: str) -> Collection[str]:
    """Return the subjects whose runs the checks can judge in this world."""
    if world == EVERY:
        return [kind for kind in SUBJECTS if all(kind in kinds for kinds in _SUBJECTS_OF_WORLD.values())]
    return _SUBJECTS_OF_WORLD.get(world, SUBJECTS)


def _subject_under(number: int, profile: Profile) -> str:
    """Return one of the subjects that the profile is about, in turn."""
    kinds = profile.subjects or tuple(subjects_of(profile.world))
    return kinds[number % len(kinds)]


def choices_of(seed: int, profile: str | None, subject: str | None, world: str | None) -> tuple[Profile, str]:
    """Return the profile and the subject of a run: those that the caller gives, else those that the seed chooses.

    Raises ValueError if no check can judge this subject under this profile.
    """
    chosen = ALL[profile] if profile else profile_of(seed, world or "one")
    if subject is None and profile and chosen.subjects:
        subject = _subject_under(seed, chosen)
    kind = subject or subject_of(seed, world if world and not (profile and world == EVERY) else chosen.world)
    if kind not in subjects_of(chosen.world):
        raise ValueError(f"no check can judge a {kind} under {chosen.name!r}")
    return chosen, kind
