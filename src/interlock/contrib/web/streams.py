"""The messages of a topic as server-sent events, for whichever face runs an event loop."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from interlock.contrib.web.feed import Feed
    from interlock.contrib.web.site import Answer

__all__ = ["events"]

LASTS: Final = 20.0, 30.0  # seconds of one stream, between these: at random, so that many do not come back at once


async def events(feed: Feed, answer: Answer) -> AsyncIterator[bytes]:
    """The messages of a topic as server-sent events, until the viewer goes, or for `LASTS`.

    A browser asks for the next stream by itself, behind the last message that it has. So the host authorizes the viewer
    again, and a server that shuts down has soon sent all its replies.
    """
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(news.set)

    version, until = answer.version, loop.time() + random.uniform(*LASTS)
    feed.listen(answer.topic, wake)
    try:
        yield b"retry: 1000\n\n"
        while True:
            for message in feed.after(answer.topic, version):
                version = message[6 : message.index(b'"', 6)].decode()  # {"v":"...
                yield b"id: " + version.encode() + b"\ndata: " + message + b"\n\n"
            try:
                await asyncio.wait_for(news.wait(), until - loop.time())
            except TimeoutError:
                return
            news.clear()
    finally:
        feed.leave(answer.topic, wake)
