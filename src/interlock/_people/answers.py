"""Questions that many callers ask at about the same time: the first of them asks the server, for all.

The time of many callers may be over at one moment, and each wants to know where the same holder is. An answer counts
for `REPORT_INTERVAL`, since the processes themselves say nothing new sooner. A question without an answer is no error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from interlock._protocol.log import log
from interlock._protocol.runtime import AutoResetEvent, Runtime
from interlock._protocol.server import Disconnected, ServerError
from interlock.errors import LockError
from interlock.primitives.registry import REPORT_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
MAX_ANSWERS: Final = 100  # that are remembered: each may be of some hundred kB


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What the server said."""

    asked_at: float
    value: T


@dataclass(slots=True)
class Question(Generic[T]):
    """A question that is under way."""

    waiting: list[AutoResetEvent] = field(default_factory=list[AutoResetEvent])  # for the answer
    answer: Answer[T] | None = None


class Answers(Generic[T]):
    """The answers to questions of one kind, by what each question is about."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._known: dict[str, Answer[T]] = {}
        self._asking: dict[str, Question[T]] = {}

    async def get(self, about: str, ask: Callable[[], Awaitable[T]], until: float) -> Answer[T] | None:
        """The answer of `ask`, not older than `REPORT_INTERVAL`. None if no answer comes by the time `until`."""
        own, answered = Question[T](), self.runtime.event()
        try:
            with self.runtime.mutex:
                asked_at, known = self.runtime.now(), self._known.get(about)
                if known is not None and asked_at <= known.asked_at + REPORT_INTERVAL:
                    return known
                question = self._asking.setdefault(about, own)
                question.waiting.append(answered)
            if question is not own:
                await answered.wait(until)
                return question.answer
            own.answer = Answer(asked_at, await ask())
            with self.runtime.mutex:
                if len(self._known) >= MAX_ANSWERS:
                    self._known.clear()
                self._known[about] = own.answer
        except (Disconnected, ServerError, LockError) as error:
            log.debug("the registry: no answer about %s: %s", about, error)
        finally:
            with self.runtime.mutex:
                if self._asking.get(about) is own:
                    del self._asking[about]
            for each in own.waiting:
                each.set()
        return own.answer
