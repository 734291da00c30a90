"""Middleware that answers a request whose lock is busy, lost or unavailable: 423 or 503, with `Retry-After`."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Literal

from django.http import HttpResponse
from django.utils.deprecation import MiddlewareMixin

from interlock._protocol.log import log
from interlock.contrib.http import ANSWERED, answer_to
from interlock.errors import Unavailable

from .aliases import locks
from .settings import aliases

if TYPE_CHECKING:
    from django.http import HttpRequest

__all__ = ["LocksMiddleware"]

WARN_EVERY: Final = 60.0  # seconds


class LocksMiddleware(MiddlewareMixin):
    """`MIDDLEWARE = [..., "interlock.contrib.django.middleware.LocksMiddleware"]`, for WSGI and ASGI.

    It answers what a view raises: 423 if somebody else holds the lock, 503 if the lock's server does not answer or the
    lease was lost, with a problem document that names the lock and nothing else of the fleet. Put it at the end of the
    list: Django asks the last one first. The server loads it at its start, and so finds mistakes in the settings then.
    """

    busy: Literal[423, 409] = 423
    """The status while somebody else holds the lock: 409 in a subclass, for clients or proxies that don't know 423."""

    def __init__(self, get_response: Any) -> None:
        super().__init__(get_response)
        self._warned_at: float | None = None
        for alias in aliases():
            locks[alias]

    def process_exception(self, _request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Answer an error of a lock that a client may meet though the program is right; leave the others to Django."""
        if not isinstance(exception, ANSWERED):
            return None
        if isinstance(exception, Unavailable):
            self._warn(exception)
        answer = answer_to(exception, busy=self.busy)
        return HttpResponse(answer.body, status=answer.status, headers=answer.headers)

    def _warn(self, error: Unavailable) -> None:
        """Log the error, which the answers don't show, once in `WARN_EVERY` seconds at most."""
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at >= WARN_EVERY:
            self._warned_at = now
            log.warning("interlock: %s. Requests that need a lock are answered with 503 until then", error)
