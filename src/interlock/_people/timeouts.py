"""Saying more in the error of a caller whose time is over: where its holder is, or in which deadlock the caller was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock._client.error_texts import WAIT_ADVICE
from interlock._protocol.lock_fields import lock_fields
from interlock._protocol.log import log

if TYPE_CHECKING:
    from interlock._client.grant import Attempt
    from interlock._people.deadlock_search import DeadlockSearch
    from interlock._people.registry import Registry
    from interlock.errors import AcquireTimeout

MIN_WAIT_TO_ASK: Final = 1.0  # seconds: after a shorter wait, the error asks nobody for more


class Timeouts:
    """Says more in the errors of the callers of one session."""

    def __init__(self, registry: Registry, deadlocks: DeadlockSearch) -> None:
        self.registry = registry
        self.deadlocks = deadlocks

    async def say_more(self, attempt: Attempt, error: AcquireTimeout, until: float) -> None:
        """Add to the error what is known of its holder by the time `until`. Raises no other error."""
        try:
            await self._add_place(attempt, error, until)
        except Exception:  # noqa: BLE001 (logged) this reads what other processes have written
            log.exception(
                "%s: the error does not say where its holder is",
                attempt.resource,
                extra=lock_fields(attempt.resource, token=attempt.token),
            )

    async def _add_place(self, attempt: Attempt, error: AcquireTimeout, until: float) -> None:
        """Add to the error where its holder acquired the resource, if the caller has waited for a while.

        Returns by the time `until`. If the caller was part of a deadlock, or waited behind one, says that instead.
        """
        advice = f". {WAIT_ADVICE}"
        if error.holder is None or error.waited < MIN_WAIT_TO_ASK or not str(error).endswith(advice):
            return
        text = str(error).removesuffix(advice)
        found = await self.registry.holding(error.holder, until)
        if found is not None:
            error.place = found.place
            error.args = (f"{text}. {found.sentence()}{advice}",)
        if known := await self.deadlocks.say(attempt, error.holder, until):
            error.deadlock, sentence = known
            error.args = (f"{text}. {sentence}",)
