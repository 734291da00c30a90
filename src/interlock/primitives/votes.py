"""The votes of a quorum, as the merge rules need them: the replies to one call, and the number of a majority."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from interlock.primitives.codes import QUARANTINE

if TYPE_CHECKING:
    from collections.abc import Sequence

C = TypeVar("C")
R = TypeVar("R")


class Votes(NamedTuple, Generic[C, R]):
    """The replies of a quorum's servers to one call so far."""

    call: C
    replies: Sequence[R]
    pending: int
    """How many servers may still answer."""
    total: int

    @property
    def majority(self) -> int:
        """More than half of all servers, whether these answer or not."""
        return self.total // 2 + 1

    def majority_pttl(self, pttls: Sequence[int]) -> int:
        """Return after how many ms a majority of servers is free of a lease or a quarantine; -1 if none ever is.

        `pttls`: after how many ms each of these servers is free; below 0: never. All other servers count as never free.
        If too few servers are ever free, the longest time counts.
        """
        bounded = sorted(pttl for pttl in pttls if pttl >= 0)
        return bounded[min(self.majority, len(bounded)) - 1] if bounded else -1

    def agreed_fence(self, fences: Sequence[int]) -> int | None:
        """Return the fence that a majority has; None if these servers are no majority with the same fence."""
        fence, number = Counter(fences).most_common(1)[0]
        return fence if number >= self.majority else None


def holder_of(value: bytes) -> bytes:
    """Return the holder in a lock's value, without the mark of a revocation; all quarantines count as one holder."""
    return QUARANTINE if value.startswith(QUARANTINE) else value.removeprefix(b"!")
