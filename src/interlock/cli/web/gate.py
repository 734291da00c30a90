"""Who may look at the page of `interlock web`: everybody with its token; without a token, everybody on this machine.

Rules. (a) The token stands only in the first address: the answer puts a hash of the token into a cookie, and redirects
to the address without it. (b) Without a token, the gate answers only requests to a name of this machine. Else a foreign
name that leads here would let a browser ask (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["COOKIE", "LOCAL", "Gate"]

COOKIE: Final = "interlock-token"
LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
MONTH: Final = 30 * 86_400  # seconds


class Gate:
    """An ASGI app that lets only visitors in who may look."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """`token`: "" for a page that everybody on this machine may see."""
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        answer = self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self.app)(scope, receive, send)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a visitor that stays outside; None: the visitor may go on."""
        if not self.token:
            host = request.url.hostname or ""
            if host in LOCAL:
                return None
            return PlainTextResponse(
                f"This page is for this machine, and {host} is no name of it: open http://127.0.0.1", 421
            )
        given = request.query_params.get("token")
        if given is not None and self._is_right(_cookie_of(given)):
            return self._let_in(request)
        if self._is_right(request.cookies.get(COOKIE, "")):
            return None
        return PlainTextResponse("This page needs its token: open the address that `interlock web` has printed", 403)

    def _is_right(self, cookie: str) -> bool:
        return secrets.compare_digest(cookie.encode(), _cookie_of(self.token).encode())

    def _let_in(self, request: Request) -> Response:
        query = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
        answer = RedirectResponse(f"{request.scope['path']}{'?' if query else ''}{query}", 303)
        answer.set_cookie(
            COOKIE, _cookie_of(self.token), max_age=MONTH, httponly=True, samesite="strict",
            secure=request.url.scheme == "https", path=request.scope.get("root_path") or "/",
        )  # fmt: skip
        answer.headers["Cache-Control"] = "no-store"
        answer.headers["Referrer-Policy"] = "no-referrer"
        return answer


def _cookie_of(token: str) -> str:
    """What the cookie has in place of the token."""
    return hashlib.sha256(f"interlock web {token}".encode()).hexdigest()
