"""What a message is about: a `Resource`, which is a name in the server, with its keys and the script that decides."""

from __future__ import annotations

from typing import NamedTuple

Argument = str | bytes


class Script(NamedTuple):
    """A .lua file: its name, text, and the SHA1 by which servers know it."""

    name: str
    source: str
    sha: str


class Resource(NamedTuple):
    """One named thing in the server: the script that decides about it, and the keys of that script."""

    kind: str
    name: str
    script: Script
    keys: tuple[str, ...]
    acquire_args: tuple[Argument, ...] = ()
    """The arguments of an acquire of this resource, after those that every acquire has."""
    owner_prefix: str = ""
    """The text with which its tokens begin, if one holder (an owner) can be in several processes."""
    release_args: tuple[Argument, ...] = ()
    """The arguments of a release of this resource, after those that every release has."""
    has_generation: bool = False
    """Whether each waiter says in which generation it waits, so that no waiter stays in another generation."""
    counts_arrivals: bool = False
    """Whether an acquire without a generation is an arrival, which the server counts, and remembers for 60 s."""
    renewed_key: int = 0
    """The index of a key that a renewal needs besides the first two."""

    @property
    def prefix(self) -> str:
        """What stands before its name, as its Interlock says."""
        return self.keys[0].removesuffix(self.name)

    @property
    def renew_keys(self) -> tuple[str, ...]:
        """The keys that a renewal needs."""
        return (*self.keys[:2], self.keys[self.renewed_key]) if self.renewed_key else self.keys[:2]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"
