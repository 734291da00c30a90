"""The page as URLs of a Django project, behind its middleware and its login.

    path("locks/", include(django.urls(locks, authorize=lambda request: request.user.is_staff and str(request.user))))

Under ASGI the page gets a stream of events, under WSGI it polls.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportMissingImports=false
# (Django comes without types.)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import re_path
from django.views.decorators.csrf import csrf_exempt

from interlock.contrib.web import feed_of
from interlock.contrib.web.site import MAX_BODY, Answer, Asked, Site, checked, person_of, refused
from interlock.contrib.web.streams import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock import aio, threads

__all__ = ["urls"]


def urls(
    locks: threads.Interlock | aio.Interlock,
    *,
    authorize: Callable[[Any], str | bool | None],
    allow_revoke: bool | Callable[[Any], bool] = False,
) -> list[Any]:
    """URL patterns for `include()`. `authorize` and `allow_revoke` get each `HttpRequest`; see `app`.

    Raises ConfigError.
    """
    checked(authorize, allow_revoke, is_async=False)
    feed = feed_of(locks)
    sites = {streams: Site(feed, streams=streams) for streams in (False, True)}

    def page(request: Any, path: str) -> Any:
        person = person_of(authorize(request))
        if person is None:
            return _response(refused())
        streams = isinstance(request, ASGIRequest)
        may = allow_revoke(request) if callable(allow_revoke) else allow_revoke
        full = str(request.path)
        asked = Asked(
            str(request.method),
            f"/{path}",
            full[: len(full) - len(path)].rstrip("/"),
            request.GET.dict(),
            {name.lower(): value for name, value in request.headers.items()},
            f"{request.scheme}://{request.get_host()}",
            request.COOKIES,
            request.read(MAX_BODY + 1) if request.method == "POST" else b"",
            person,
            may_revoke=may is True,
        )
        answer = sites[streams].answer(asked)
        if answer.topic:
            return StreamingHttpResponse(events(feed, answer), headers=answer.headers)
        return _response(answer)

    # The page has a token of its own, which is checked whatever middleware the project has.
    return [re_path(r"^(?P<path>.*)$", csrf_exempt(page))]


def _response(answer: Answer) -> Any:
    return HttpResponse(answer.body, status=answer.status, headers=answer.headers)
