"""Running a coroutine that never suspends, as no coroutine of interlock does over the transport for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from interlock._protocol.forks import KNOWN, notice

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. No coroutine that uses the transport for threads ever suspends.

    A coroutine can't raise StopIteration: Python makes a RuntimeError of it. So a StopIteration of a user's function,
    which the coroutine called, is raised here.

    Each call of threads passes here, or `Lockable.__enter__`: so in a child after a fork, all clients begin anew first.
    """
    if not KNOWN[0]:
        notice()
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value  # type: ignore[no-any-return]
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):
            raise error.__cause__ from None
        raise
    coroutine.close()
    raise RuntimeError("a coroutine was suspended, although threads run it")
