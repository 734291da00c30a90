"""Stable chance: every random number has a name, and depends on the seed and this name only.

Theory. With one stream of random numbers, an actor that draws one number less changes all later numbers of the whole
world: a run without one of its faults would be another run. So a number belongs to an *actor* (a coroutine, a process),
to a purpose, and to an index: how many numbers of this purpose the actor drew before in the same *era*. An era is a
section of a worker, or else a quarter of a second. When a plan leaves out a fault, all other sections, messages and
faults stay the same. Shrinking depends on that.

Rules.
(a) No number depends on a name that counts events of other actors, or on Python's hash of a text.
(b) Each number is drawn whether or not the run uses it: a fault that a plan rules out still draws its number.
"""

from __future__ import annotations

import hashlib
import math
import random
import zlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .scheduler import World

# The purposes of numbers.
STEP, MESSAGE, CORE, TRAFFIC, GAP, SECTION, STRIKE, CLIENT, TIE, GROUPS, FOREIGN = range(1, 12)
PURPOSES: Final = 12
ERA: Final = 0.25  # seconds of one era, outside sections


class Chance:
    """All random numbers of a seed."""

    def __init__(self, seed: int) -> None:
        self._root = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=7).digest(), "big")

    def number(self, *key: int) -> float:
        """Return the number of this place, from 0 to 1.

        A tuple of ints has the same hash everywhere; this method then mixes the bits of the hash.
        """
        mixed = hash((self._root, *key, 7))
        mixed = ((mixed ^ (mixed >> 32)) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        return (mixed >> 11) * 2**-53

    def stream(self, *key: int) -> random.Random:
        """Return a generator of many numbers for one place."""
        return random.Random(hash((self._root, *key, 11)))


class Actor:
    """A coroutine or process that draws numbers."""

    __slots__ = ("_counts", "_until", "era", "in_section", "name", "number", "world")

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.number = zlib.crc32(name.encode())
        self.era = 0
        self.in_section = False
        self._until = 0.0  # when the era ends, outside sections
        self._counts = [0] * PURPOSES

    def enter(self, section: int) -> None:
        """Begin a section: from now on, numbers belong to this section."""
        self.in_section, self._until = True, math.inf
        self._begin(section)

    def leave(self) -> None:
        """End the section."""
        self.in_section, self._until = False, 0.0

    def _begin(self, era: int) -> None:
        self.era = era
        self._counts = [0] * PURPOSES

    def next_key(self, purpose: int) -> tuple[int, int, int, int]:
        """Return the next place of this purpose."""
        if self.world.now >= self._until:
            quarter = int(self.world.now / ERA)
            self._until = (quarter + 1) * ERA
            self._begin(-1 - quarter)
        self._counts[purpose] += 1
        return self.number, self.era, purpose, self._counts[purpose]

    def draw(self, purpose: int) -> float:
        """Return the next number of this purpose."""
        return self.world.chance.number(*self.next_key(purpose))


class CoreChance(random.Random):
    """The core's substitute for the module `random`: it draws the numbers of the current actor."""

    def __init__(self, world: World) -> None:
        super().__init__(0)
        self._world = world

    def random(self) -> float:
        """See random.random."""
        return self._world.acting.draw(CORE)

    def getrandbits(self, k: int, /) -> int:
        """See random.getrandbits."""
        bits = 0
        for _ in range(0, k, 32):
            bits = bits << 32 | int(self.random() * 2**32)
        return bits & ((1 << k) - 1)
