"""The live page: every lock of a fleet at a glance, to mount in a program that serves HTTP.

    from interlock.contrib import web

    app.mount("/locks", web.app(locks, authorize=lambda request: request.session.get("user")))   # FastAPI, Starlette
    web.wsgi_app(locks, authorize=...)                                                           # Flask and others
    path("locks/", include(django.urls(locks, authorize=...)))     # Django: from interlock.contrib.web import django

`interlock web` serves it alone. `app` needs the extra `web`: starlette.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.contrib.web.feed import Feed
from interlock.contrib.web.site import checked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from interlock import aio, threads
    from interlock.contrib.web.asgi import AsgiPage
    from interlock.contrib.web.wsgi import WsgiPage

__all__ = ["anybody", "app", "wsgi_app"]

NO_STARLETTE = "interlock.contrib.web.app needs starlette: pip install 'interlock[web]'"


def app(
    locks: threads.Interlock | aio.Interlock,
    *,
    authorize: Callable[[Request], str | bool | Awaitable[str | bool | None] | None],
    allow_revoke: bool | Callable[[Request], bool | Awaitable[bool]] = False,
) -> AsgiPage:
    """Make the page as an ASGI app, which sees all locks of the server of this Interlock.

    `authorize` gets each request (starlette's `Request`) and returns the name of the visitor, for the audit; or True
    for a visitor without a name; or None or False, which answers 403. Whatever else it returns raises ConfigError for
    that request. It may be async. `allow_revoke`: whether visitors may revoke, or a callable that says so of a request:
    True alone lets them. The page has connections of its own, so any event loop may use it; it makes none before
    somebody looks. Raises ConfigError.
    """
    try:
        from interlock.contrib.web.asgi import AsgiPage  # noqa: PLC0415 (the other faces need no starlette)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_STARLETTE, name=error.name) from error
    checked(authorize, allow_revoke, is_async=True)
    return AsgiPage(feed_of(locks), authorize, allow_revoke)


def wsgi_app(
    locks: threads.Interlock | aio.Interlock,
    *,
    authorize: Callable[[dict[str, Any]], str | bool | None],
    allow_revoke: bool | Callable[[dict[str, Any]], bool] = False,
) -> WsgiPage:
    """Make the page as a WSGI app. As `app`, but `authorize` gets the `environ`, and is no coroutine function.

    The page polls, since a stream of events would keep a worker busy. Raises ConfigError.
    """
    from interlock.contrib.web.wsgi import WsgiPage  # noqa: PLC0415

    checked(authorize, allow_revoke, is_async=False)
    return WsgiPage(feed_of(locks), authorize, allow_revoke)


def anybody(_request: object) -> bool:
    """Let everybody look who can reach the page: for `authorize`, where something else keeps strangers out."""
    return True


def feed_of(locks: threads.Interlock | aio.Interlock) -> Feed:
    """The feed of the server of this Interlock."""
    address = locks._address

    def examine() -> list[dict[str, str]]:
        from interlock._doctor.checks import findings  # noqa: PLC0415 (it imports redis-py)
        from interlock._doctor.facts import ask_at  # noqa: PLC0415

        return [
            each.as_json()
            for each in findings(ask_at(address, locks.prefix), max_ttl=locks.max_ttl, prefix=locks.prefix)
        ]

    return Feed(address, label=f"{locks.label or 'interlock'}-page", examine=examine)
