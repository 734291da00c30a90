"""What the primitives' merge rules need of a quorum: the replies of its servers to one call, and its majority."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from interlock.primitives.codes import QUARANTINE

if TYPE_CHECKING:
    from collections.abc import Sequence

C = TypeVar("C")
R = TypeVar("R")


class Votes(NamedTuple, Generic[C, R]):
    """The replies to one call, so far."""

    call: C
    replies: Sequence[R]
    pending: int
    """How many servers may still answer."""
    total: int

    @property
    def majority(self) -> int:
        """Of all servers, answering or not."""
        return self.total // 2 + 1

    def majority_pttl(self, pttls: Sequence[int]) -> int:
        """When a majority is over this, if these servers are so after so many ms and the others never."""
        bounded = sorted(pttl for pttl in pttls if pttl >= 0)
        return bounded[min(self.majority, len(bounded)) - 1] if bounded else -1

    def agreed_fence(self, fences: Sequence[int]) -> int | None:
        """The fence that a majority has; None if no majority has agreed yet, or if its servers are not among these."""
        fence, number = Counter(fences).most_common(1)[0]
        return fence if number >= self.majority else None


def holder_of(value: bytes) -> bytes:
    """The holder in a lock's value: a revoked holder is the same holder, and one quarantine is like another."""
    return QUARANTINE if value.startswith(QUARANTINE) else value.removeprefix(b"!")
