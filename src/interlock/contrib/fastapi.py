"""Locks in an application of FastAPI: a lease as a dependency, `locked("cart:{user_id}")`. Needs `interlock[fastapi]`.

Theory (ADR 45). `locked()` is a dependency with a `yield`. The fields of its template are parameters of the endpoint or
of the endpoint's other dependencies: FastAPI's own functions take them from the path, the query, the headers or the
cookies of the request, as for the endpoint, so that "007" and "7" are one lock if they are one `int` to the endpoint.
The lifespan, `interlocked()`, looks through all routes when the app starts, and refuses a template that names no
parameter.

Rules. (a) A lease ends when the endpoint has returned, before the answer is sent: a loss can still become a 503, and a
slow client holds no lock. `scope="request"` ends it after the answer and the background tasks. (b) No lock is acquired
for a request with a bad parameter in the name. (c) Two functions of FastAPI are used that its pages do not describe,
`get_dependant` and `request_params_to_args`: the tests run with the oldest and the newest FastAPI.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

try:
    import fastapi
    from fastapi import Depends, params
    from fastapi.dependencies.utils import get_dependant, request_params_to_args
    from fastapi.exceptions import RequestValidationError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.fastapi needs FastAPI: pip install fastapi, or '.[fastapi]' in a checkout of interlock",
        name=error.name,
    ) from error

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request

from interlock._protocol.log import log
from interlock.aio import Interlock, Lease
from interlock.errors import AcquireTimeout, ConfigError

from ._names import TemplateNames
from .starlette import Startable, answers, held, interlock_of, leading, lifespan_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
    from contextlib import AbstractAsyncContextManager
    from typing import Unpack

    from fastapi.dependencies.models import Dependant

    from interlock.aio import Options

    from .starlette import Lifespan, State

__all__ = [
    "Interlock", "Lease", "Locks", "Startable", "answers", "held", "interlocked", "leading", "locked", "responses",
]  # fmt: skip

TIMEOUT: Final = 10.0  # seconds that a request waits if nothing else is said: about as long as people do
# Since FastAPI 0.121 a dependency says when it ends. Before 0.118 all ended before the answer was sent, and from 0.118
# on after it, when a lost lease can't become a 503 any more.
_MAY_SAY_WHEN: Final = "scope" in inspect.signature(Depends).parameters
if not _MAY_SAY_WHEN and fastapi.__version__.startswith(("0.118.", "0.119.", "0.120.")):
    raise ImportError(
        f"interlock.contrib.fastapi can't use FastAPI {fastapi.__version__}, in which each dependency ends after the "
        "answer was sent. Use 0.121 or later, or 0.110 to 0.117"
    )
_KINDS: Final = ("path", "query", "header", "cookie")


async def _interlock(connection: HTTPConnection) -> Interlock:
    return interlock_of(connection)


Locks = Annotated[Interlock, Depends(_interlock)]
"""The Interlock of the process, for an endpoint: `async def stock(locks: Locks)`."""


def interlocked(
    target: str | Interlock | Callable[[], Interlock] | None = None, *lifespans: Lifespan
) -> Callable[[Any], AbstractAsyncContextManager[State]]:
    """Return a lifespan that opens the Interlock of a process, and closes it: `FastAPI(lifespan=interlocked(url))`.

    `target` is a URL, an Interlock of `interlock.aio`, a function that makes one, or nothing: then $INTERLOCK_URL. An
    Interlock can be closed only once: an app that is started again needs a URL or a function. `lifespans` are others,
    such as your own. They begin after the Interlock is open, in this order, and end before it is closed.

    A server that is away is logged once, and the app starts. Raises ConfigError when the app starts: for a bad URL, a
    server that refuses what a lock needs, an app that runs already, or a `locked` whose template names no parameter of
    its endpoint, or whose options are wrong.
    """
    return lifespan_of(target, lifespans, _check)


def locked(
    name: str | Callable[..., Any],
    *,
    scope: Literal["function", "request"] = "function",
    **options: Unpack[Options],
) -> params.Depends:
    """Return a dependency that holds a lock while the endpoint runs.

    `lease: Annotated[Lease, locked("cart:{user_id}", timeout=2)]` is a parameter of an endpoint, or of a dependency.
    Where no code needs the lease, write `dependencies=[locked("cart:{user_id}")]` in the route.

    Args:
        name: a format, whose fields are parameters of the endpoint or of its dependencies (path, query, header or
            cookie, with the type that they have there); or a dependency that returns the name.
        scope: when the lease ends. "function": when the endpoint has returned, before the answer is sent. "request":
            after the answer and its background tasks; a stream needs that.
        options: as for `Interlock.lock`, but `timeout` is 10 s if it is left out. With None a request waits for as
            long as its client does.

    A request whose lock stays busy gets 423, and 503 if no server answers or its lease is lost, if the app has
    `exception_handlers=answers()`. A loss cancels an `async def` endpoint. A `def` endpoint runs in a thread, which
    nothing can cancel: it asks `lease.ensure()`; its answer is 503 if the lease was lost meanwhile.

    Each call makes a dependency of its own. If several parts of a request need one lease, they share an `Annotated`:
    `Cart = Annotated[Lease, locked("cart:{user_id}")]`. Raises ConfigError.
    """
    if scope not in {"function", "request"}:
        raise ConfigError(f"locked(): scope must be 'function' or 'request', not {scope!r}")
    if scope == "request" and not _MAY_SAY_WHEN:
        raise ConfigError(f"locked(scope='request') needs FastAPI 0.121 or later, and this is {fastapi.__version__}")
    if not isinstance(name, str) and not callable(name):
        raise ConfigError(f"locked(): the name must be a str or a dependency that returns one, not {name!r}")
    dependency = _Locked(name, scope, {"timeout": TIMEOUT, **options})
    made: params.Depends = Depends(dependency, scope=scope) if _MAY_SAY_WHEN else Depends(dependency)
    return made


class _Locked:
    """The dependency. FastAPI reads its signature, and calls it for each request."""

    def __init__(self, name: str | Callable[..., Any], scope: str, options: Options) -> None:
        self.name, self.scope, self.options = name, scope, options
        parameters = [inspect.Parameter("connection", inspect.Parameter.KEYWORD_ONLY, annotation=HTTPConnection)]
        if isinstance(name, str):
            TemplateNames(str(self), name, "the endpoint", _fields(str(self), name))  # is it a format at all?
        else:
            parameters.append(inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=Depends(name)))
        self.__signature__ = inspect.Signature(parameters)
        self._names: dict[tuple[object, frozenset[str]], _Names] = {}

    async def __call__(self, *, connection: HTTPConnection, name: object = None) -> AsyncGenerator[Lease]:
        if not isinstance(connection, Request):
            raise ConfigError(self.not_for_websockets)
        endpoint = connection.scope.get("endpoint")
        if isinstance(self.name, str):
            name = self.names(endpoint, frozenset(connection.path_params)).of(connection)
        elif not isinstance(name, str):
            raise ConfigError(f"{self} must return the name of a lock, a str, not {name!r}")
        lock = interlock_of(connection).lock(name, **self.options)
        async with held(connection, lock, cancels=_runs_in_the_loop(endpoint)) as lease:
            yield lease

    def names(self, endpoint: Any, in_path: frozenset[str]) -> _Names:
        """What makes the names for this endpoint, at a path with these parameters. Raises ConfigError."""
        key = endpoint, in_path
        if (names := self._names.get(key)) is None:
            names = self._names[key] = _Names(str(self), str(self.name), endpoint, in_path)
        return names

    def check(self, endpoint: Any, in_path: frozenset[str], locks: Interlock) -> None:
        """Refuse at the start what no request could use. Raises ConfigError."""
        locks.lock("example", **self.options)
        if isinstance(self.name, str):
            self.names(endpoint, in_path)
        generator = inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint)
        if self.scope == "function" and _MAY_SAY_WHEN and generator:
            raise ConfigError(
                f"{self}: {endpoint.__qualname__}() is a generator, which runs while its answer is sent, and by then "
                "the lease would have ended. Use scope='request'"
            )

    @property
    def not_for_websockets(self) -> str:
        """The message for a websocket endpoint."""
        return f"{self} is for HTTP. In a websocket endpoint write `async with locks.lock(name):`, with `locks: Locks`"

    def __str__(self) -> str:
        return f"locked({self.name if isinstance(self.name, str) else getattr(self.name, '__qualname__', self.name)!r})"


class _Source(NamedTuple):
    """Where a parameter of an endpoint is in a request."""

    kind: str
    field: Any  # a ModelField, which FastAPI does not export


class _Names:
    """Makes the name of a lock from the parameters of a request to one endpoint."""

    def __init__(self, subject: str, template: str, endpoint: Any, in_path: frozenset[str]) -> None:
        caller = getattr(endpoint, "__qualname__", repr(endpoint))
        path = "".join(f"/{{{name}}}" for name in sorted(in_path))
        if _MAY_SAY_WHEN:  # the scope that FastAPI itself gives to an endpoint, which may be a generator
            dependant = get_dependant(path=path, call=endpoint, scope="function")
        else:
            dependant = get_dependant(path=path, call=endpoint)
        sources: dict[str, _Source] = {}
        in_body: set[str] = set()
        for each in _tree(dependant):
            for kind in _KINDS:
                for field in getattr(each, f"{kind}_params"):
                    sources.setdefault(field.name, _Source(kind, field))
            in_body |= {field.name for field in each.body_params}
        known = [*sources, *(name for name in sorted(in_path) if name not in sources)]
        fields = _fields(subject, template)
        if bodies := [name for name in fields if name in in_body and name not in known]:
            raise ConfigError(
                f"{subject}: {bodies[0]!r} of {caller}() is in the body. Name a dependency that takes it, and returns "
                "the name of the lock"
            )
        self._sources = {name: sources.get(name) for name in fields}
        self._names = TemplateNames(subject, template, caller, known)

    def of(self, request: Request) -> str:
        """The name for this request. Raises ConfigError, or RequestValidationError, which is a 422."""
        received: dict[str, Any] = {
            "path": request.path_params,
            "query": request.query_params,
            "header": request.headers,
            "cookie": request.cookies,
        }
        values: dict[str, Any] = {}
        errors: list[Any] = []
        for name, source in self._sources.items():
            if source is None:  # no function has such a parameter: it is what the path says
                values[name] = request.path_params.get(name)
            else:
                found, wrong = request_params_to_args([source.field], received[source.kind])
                values |= found
                errors += wrong
        if errors:
            raise RequestValidationError(errors)
        return self._names.of(values)


def _fields(subject: str, template: str) -> dict[str, None]:
    return TemplateNames.fields_of(subject, template)


def _runs_in_the_loop(endpoint: Any) -> bool:
    """Whether the endpoint is `async def`, and no `def`, which FastAPI runs in a thread."""
    while isinstance(endpoint, partial):
        endpoint = endpoint.func
    endpoint = inspect.unwrap(endpoint)
    if not inspect.isroutine(endpoint) and not inspect.isclass(endpoint):
        endpoint = getattr(endpoint, "__call__", endpoint)  # noqa: B004
    return inspect.iscoroutinefunction(endpoint) or inspect.isasyncgenfunction(endpoint)


# The look at all routes when the app starts


class _Route(NamedTuple):
    """One endpoint of an app, or of an app that is mounted in it."""

    app: Starlette
    path: str
    endpoint: Any
    in_path: frozenset[str]
    dependant: Dependant
    is_websocket: bool


def _check(app: Starlette, locks: Interlock) -> None:
    """Refuse what no request could use, and warn of answers that nobody makes. Raises ConfigError."""
    without_answers: dict[Starlette, str] = {}
    for route in _routes_of(app, app.routes):
        seen: dict[object, _Locked] = {}
        for each in _tree(route.dependant):
            if isinstance(each.call, _Locked):
                try:
                    each.call.check(route.endpoint, route.in_path, locks)
                    if route.is_websocket:
                        raise ConfigError(each.call.not_for_websockets)
                    if seen.setdefault(each.call.name, each.call) is not each.call:
                        raise ConfigError(
                            f"{each.call} stands twice in one endpoint, which would wait for itself. If both are to "
                            "have one lease, they share one Annotated: `Cart = Annotated[Lease, locked(...)]`"
                        )
                except ConfigError as error:
                    raise ConfigError(f"{route.path}: {error}") from None
                if not any(kind in route.app.exception_handlers for kind in AcquireTimeout.__mro__):
                    without_answers.setdefault(route.app, f"{route.path}, {each.call}")
    for where in without_answers.values():
        log.warning("%s: a busy lock will be answered with 500. Use FastAPI(exception_handlers=answers())", where)


def _routes_of(
    app: Starlette, routes: Iterable[Any], outer: str = "", in_path: frozenset[str] = frozenset()
) -> Iterator[_Route]:
    """The routes of FastAPI in these, also in what is mounted or included."""
    for route in _included(routes):
        path = outer + (getattr(route, "path", None) or "")
        names = in_path | set(getattr(route, "param_convertors", ()))
        if (dependant := getattr(route, "dependant", None)) is not None:
            yield _Route(app, path, route.endpoint, names, dependant, getattr(route, "methods", None) is None)
        elif inner := getattr(route, "routes", None):
            mounted = getattr(route, "app", None)
            yield from _routes_of(mounted if isinstance(mounted, Starlette) else app, inner, path, names)


def _included(routes: Iterable[Any]) -> Iterable[Any]:
    """The routes, and those of routers that are included, which newer versions of FastAPI keep apart."""
    every: Callable[[Iterable[Any]], Iterable[Any]] | None = getattr(fastapi.routing, "iter_route_contexts", None)
    return routes if every is None else every(routes)


def _tree(dependant: Dependant) -> Iterator[Dependant]:
    """This, and all that it depends on."""
    yield dependant
    for each in dependant.dependencies:
        yield from _tree(each)


# OpenAPI


def responses(*, busy: Literal[423, 409] = 423) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI shows of these answers: `@app.post("/pay", responses=responses())`, or for the whole app."""
    return {
        busy: {"description": "Somebody else holds the lock", "headers": _RETRY_AFTER, "content": _PROBLEM},
        503: {"description": "The lock is not available, or was lost", "headers": _RETRY_AFTER, "content": _PROBLEM},
    }


_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds after which to try again", "schema": {"type": "integer", "minimum": 1}}
}
_PROBLEM: Final = {
    "application/problem+json": {
        "schema": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
                "lock": {"type": "string", "description": "The name of the lock"},
            },
            "required": ["type", "title", "status", "detail"],
        }
    }
}
