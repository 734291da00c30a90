"""The messages of a topic as server-sent events, for whichever face runs an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.contrib.web.feed import Feed
    from interlock.contrib.web.site import Answer

__all__ = ["events"]


async def events(feed: Feed, answer: Answer) -> AsyncIterator[bytes]:
    """The messages of a topic as server-sent events, until the viewer goes."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(news.set)

    version = answer.version
    feed.listen(answer.topic, wake)
    try:
        yield b"retry: 1000\n\n"
        while True:
            for message in feed.after(answer.topic, version):
                version = message[6 : message.index(b'"', 6)].decode()  # {"v":"...
                yield b"id: " + version.encode() + b"\ndata: " + message + b"\n\n"
            await news.wait()
            news.clear()
    finally:
        feed.leave(answer.topic, wake)
