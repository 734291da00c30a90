"""A server and a runtime that do nothing: for tests of one part of the client, without I/O.

Each method of `Server` stands here, and raises; so does each method of `Runtime` that would run or end something. A
test overrides the methods that its part calls. So the test shows what that part needs, and any other call fails.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from interlock._protocol.timing import RETRY_FOR

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from interlock._protocol.acks import Acks
    from interlock._protocol.resource import Argument, Script
    from interlock._protocol.runtime import AutoResetEvent, Runtime, T
    from interlock._protocol.server import AckedReply, Message, PushHandler, Reply, Route, SentCall, Server


class StubEvent:
    """Counts how often it was set."""

    def __init__(self) -> None:
        self.count = 0

    def set(self) -> None:
        self.count += 1

    async def wait(self, until: float) -> bool:
        raise NotImplementedError


class StubRuntime:
    """A clock, which stands still until somebody sleeps or sets `time`; one thread, so a mutex that excludes nobody."""

    def __init__(self) -> None:
        self.time = 0.0
        self.mutex: AbstractContextManager[object] = contextlib.nullcontext()

    def holds_mutex(self) -> bool:
        return False

    def now(self) -> float:
        return self.time

    async def sleep_until(self, until: float) -> None:
        self.time = max(self.time, until)

    def event(self) -> AutoResetEvent:
        return StubEvent()

    def spawn(self, work: Callable[[], Coroutine[object, None, None]], name: str, on_end: Callable[[], None]) -> None:
        raise NotImplementedError

    def run_callback(self, callback: Callable[[T], object], subject: T) -> None:
        raise NotImplementedError

    async def run_blocking(self, work: Callable[[], T]) -> T:
        raise NotImplementedError

    def reset_after_fork(self) -> bool:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class StubServer:
    """One server, which answers nothing that a subclass does not answer. Its attributes may be set."""

    display_url = "redis://there"
    retry_for = RETRY_FOR
    has_answered = True
    is_quorum = can_fail_over = False
    majority = 1
    drift = 0.0
    push_handler: PushHandler

    def __init__(self) -> None:
        self.runtime = StubRuntime()

    async def call(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Argument], until: float) -> Reply:
        raise NotImplementedError

    async def call_with_acks(self, message: Message, until: float, acks: Acks, ack_timeout: float) -> AckedReply:
        raise NotImplementedError

    async def call_many(self, messages: Sequence[Message], until: float) -> list[Reply | Exception]:
        raise NotImplementedError

    def send(self, message: Message) -> SentCall | None:
        raise NotImplementedError

    async def prove_lossless(self, keys: Sequence[str | bytes], lost_identity: str, until: float) -> bool:
        raise NotImplementedError

    def old_primary_may_still_grant(self, key: str) -> str:
        raise NotImplementedError

    def route(self, key: str) -> Route:
        raise NotImplementedError

    def subscription_of(self, key: str | bytes) -> tuple[str, str]:
        raise NotImplementedError

    def ensure_subscribed(self, key: str) -> None:
        raise NotImplementedError

    async def connected_clients(self, until: float) -> int | None:
        raise NotImplementedError

    def reset_after_fork(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


if TYPE_CHECKING:  # a member that a protocol gets is missing here until somebody adds it
    COMPLETE: tuple[type[Server], type[Runtime]] = (StubServer, StubRuntime)
