"""The ASGI face: for `interlock web`, and to mount in FastAPI, Starlette and others. It streams events."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from interlock.contrib.web.site import MAX_BODY, Answer, Asked, Site, person_of, refused
from interlock.contrib.web.streams import events

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from interlock.contrib.web.feed import Feed


class AsgiPage:
    """The page as an ASGI app."""

    def __init__(
        self,
        feed: Feed,
        authorize: Callable[[Request], str | bool | Awaitable[str | bool | None] | None],
        allow_revoke: bool | Callable[[Request], bool | Awaitable[bool]],
    ) -> None:
        self.feed, self.site = feed, Site(feed, streams=True)
        self.authorize, self.allow_revoke = authorize, allow_revoke

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            request = Request(scope, receive)
            await (await self._respond(request))(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.feed.close)
            else:  # of a second life, too
                self.feed.open()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _respond(self, request: Request) -> Response:
        said: Any = self.authorize(request)
        if inspect.isawaitable(said):
            said = await said
        person = person_of(said)
        if person is None:
            return _response(refused())
        may: Any = self.allow_revoke
        if callable(may):
            may = may(request)
            if inspect.isawaitable(may):
                may = await may
        body = b""
        if request.method == "POST":
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    break
        asked = asked_of(request, body, person, may_revoke=may is True)
        answer = await asyncio.to_thread(self.site.answer, asked)  # it may wait for the server of the locks
        if answer.topic:
            return StreamingResponse(events(self.feed, answer), headers=answer.headers)
        return _response(answer)


def asked_of(request: Request, body: bytes, person: str, *, may_revoke: bool) -> Asked:
    """The request, for the site."""
    scope = request.scope
    root = str(scope.get("root_path", "")).rstrip("/")
    path = str(scope["path"])
    return Asked(
        request.method,
        path.removeprefix(root) if path.startswith(root) else path,
        root,
        dict(request.query_params),
        {name.lower(): value for name, value in request.headers.items()},
        f"{request.url.scheme}://{request.headers.get('host', '')}",
        request.cookies,
        body,
        person,
        may_revoke,
    )


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, answer.headers)
