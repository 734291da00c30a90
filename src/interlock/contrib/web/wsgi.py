"""The WSGI face: for Flask, Pyramid and others under a server with one thread a request. The page polls.

An event stream would keep a worker busy for as long as somebody looks.
"""

from __future__ import annotations

from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from interlock.contrib.web.site import MAX_BODY, Answer, Asked, Site, person_of, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from interlock.contrib.web.feed import Feed


class WsgiPage:
    """The page as a WSGI app."""

    def __init__(
        self,
        feed: Feed,
        authorize: Callable[[dict[str, Any]], str | bool | None],
        allow_revoke: bool | Callable[[dict[str, Any]], bool],
    ) -> None:
        self.feed, self.site = feed, Site(feed, streams=False)
        self.authorize, self.allow_revoke = authorize, allow_revoke

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        """Serve one request."""
        answer = self._answer(environ)
        headers = [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else answer.body]

    def _answer(self, environ: dict[str, Any]) -> Answer:
        person = person_of(self.authorize(environ))
        if person is None:
            return refused()
        may = self.allow_revoke(environ) if callable(self.allow_revoke) else self.allow_revoke
        length = str(environ.get("CONTENT_LENGTH") or "0")
        body = environ["wsgi.input"].read(min(int(length) if length.isdecimal() else 0, MAX_BODY + 1))
        headers = {
            key[5:].replace("_", "-").lower(): value for key, value in environ.items() if key.startswith("HTTP_")
        }
        headers["content-type"] = str(environ.get("CONTENT_TYPE", ""))
        asked = Asked(
            environ["REQUEST_METHOD"],
            _text(environ.get("PATH_INFO", "")),
            _text(environ.get("SCRIPT_NAME", "")).rstrip("/"),
            dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)),
            headers,
            f"{environ['wsgi.url_scheme']}://{headers.get('host', '')}",
            cookies_in(headers.get("cookie", "")),
            body,
            person,
            may_revoke=may is True,
        )
        return self.site.answer(asked)


def _text(value: str) -> str:
    """A path, as it was before WSGI made Latin-1 of its bytes."""
    return value.encode("latin-1", errors="replace").decode(errors="replace")


def cookies_in(header: str) -> dict[str, str]:
    """The cookies of a request."""
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}
