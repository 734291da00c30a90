"""Locks in an application of Starlette: a lifespan, answers, leases for a request, jobs of a leader.

Needs Starlette, which `interlock[fastapi]` and `interlock[web]` install. `interlock.contrib.fastapi` is made of this.

Theory (ADR 45). The lifespan opens one Interlock for the process and its event loop, and hands it to each request in
the request's state, which apps that are mounted share. `held()` acquires for a request: while the request waits, a task
watches its connection, and a client that leaves gives up its place.

Rules. (a) The server of the locks may be away when the app starts: the app starts. (b) What the watch reads of a body,
the endpoint reads again. (c) A loss cancels the body of `held()`, but not that of an endpoint that runs in a thread:
the cancellation would only abandon the thread, which would go on beside the next holder.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

try:
    from starlette.exceptions import HTTPException
    from starlette.responses import Response
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "interlock.contrib.starlette needs Starlette: "
        "pip install starlette, or '.[fastapi]' in a checkout of interlock",
        name=error.name,
    ) from error

import interlock
from interlock._protocol.log import log
from interlock.aio import Interlock
from interlock.errors import ConfigError, LockError, Unavailable

from .http import ANSWERED, answer_to

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
    from contextlib import AbstractAsyncContextManager
    from typing import Unpack

    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request

    from interlock.aio import Leadership, Lease, Lock, Options, ReadLock, Semaphore, WriteLock

    State: TypeAlias = Mapping[str, Any]
    Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[State | None]]
    Work: TypeAlias = "Callable[[Leadership], Awaitable[object]] | Startable"
    Handlers: TypeAlias = dict[Any, Callable[[Request, Any], Coroutine[Any, Any, Response]]]

__all__ = ["Startable", "answers", "held", "interlock_of", "interlocked", "leading"]

STATE: Final = "interlock"  # the name of the Interlock in a request's state
WATCH_AFTER: Final = 0.05  # seconds of waiting after which a connection is watched: most requests wait for less
READ_AHEAD: Final = 65_536  # bytes of an unread body that the watch keeps; after them it stops watching
CLIENT_GONE: Final = 499  # nginx's status for a client that left: nobody reads it but the access log
CAMPAIGN_PAUSE: Final = 5.0  # seconds after which a leader whose work failed campaigns again

_running: weakref.WeakKeyDictionary[Starlette, Interlock] = weakref.WeakKeyDictionary()


@runtime_checkable
class Startable(Protocol):
    """Something that is started and stopped, by plain methods or by `async def`."""

    def start(self) -> object:
        """Start it; return when it runs, or an awaitable that does."""

    def stop(self) -> object:
        """Stop it; return when it has ended, or an awaitable that does. It may be started again later."""


def interlocked(
    target: str | Interlock | Callable[[], Interlock] | None = None, *lifespans: Lifespan
) -> Callable[[Any], AbstractAsyncContextManager[State]]:
    """Return a lifespan that opens the Interlock of a process, and closes it: `Starlette(lifespan=interlocked(url))`.

    `target` is a URL, an Interlock of `interlock.aio`, a function that makes one, or nothing: then $INTERLOCK_URL. An
    Interlock can be closed only once: an app that is started again needs a URL or a function. `lifespans` are others,
    such as your own. They begin after the Interlock is open, in this order, and end before it is closed. A request has
    in its state what they yield.

    A server that is away is logged once, and the app starts. Raises ConfigError when the app starts: for a bad URL, a
    server that refuses what a lock needs, or an app that runs already.
    """
    return lifespan_of(target, lifespans)


def lifespan_of(
    target: str | Interlock | Callable[[], Interlock] | None,
    lifespans: tuple[Lifespan, ...],
    check: Callable[[Any, Interlock], None] | None = None,
) -> Callable[[Any], AbstractAsyncContextManager[State]]:
    """The lifespan that `interlocked` returns. `check` looks at the app before anything is sent, and may raise."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[State]:
        if app in _running:
            raise ConfigError(
                f"{app!r} runs already in this process, with an Interlock. interlocked() stands in the lifespan of the "
                "app that the server runs, once: not in that of a router or of an app that is mounted in it"
            )
        async with AsyncExitStack() as stack:
            locks = await stack.enter_async_context(_interlock_at(target))
            if check is not None:
                check(app, locks)
            try:
                await locks.ping()
            except Unavailable as error:
                log.warning("%s The app starts all the same: a request that needs a lock gets 503 meanwhile", error)
            _running[app] = locks
            stack.callback(_running.pop, app, None)
            state: dict[str, Any] = {STATE: locks}
            for each in lifespans:
                yielded: object = await stack.enter_async_context(each(app))
                state |= yielded if isinstance(yielded, Mapping) else {}
            yield state

    return lifespan


def _interlock_at(target: object) -> Interlock:
    """The Interlock that a lifespan opens. Raises ConfigError."""
    found = target() if callable(target) else target
    if isinstance(found, interlock.Interlock):
        raise ConfigError(f"{found!r} is for threads, and would block the event loop. Use interlock.aio.Interlock")
    return found if isinstance(found, Interlock) else Interlock(found)


def interlock_of(connection: HTTPConnection) -> Interlock:
    """Return the Interlock that the lifespan of the app has opened. Raises ConfigError if none has."""
    locks = getattr(connection.state, STATE, None)
    if not isinstance(locks, Interlock):
        raise ConfigError(
            "this app has no open Interlock. Give the app that the server runs `lifespan=interlocked(url)`, and let "
            "the lifespan run: in a test `with TestClient(app) as client:`; uvicorn without `--lifespan off`"
        )
    return locks


def answers(*, busy: Literal[423, 409] = 423) -> Handlers:
    """Return what answers a request that met a busy or lost lock: `Starlette(exception_handlers=answers())`.

    `busy` is the status while somebody else holds the lock. The answers are those of `interlock.contrib.http`. An app
    that is mounted in another one has handlers of its own.
    """

    async def answer(_: Request, error: LockError) -> Response:
        made = answer_to(error, busy=busy)
        return Response(made.body, made.status, made.headers)

    return dict.fromkeys(ANSWERED, answer)


@asynccontextmanager
async def held(
    request: Request, lock: Lock | ReadLock | WriteLock | Semaphore, *, cancels: bool = True
) -> AsyncGenerator[Lease]:
    """Hold a lock for a request, in an `async with`: `lock` is `locks.lock("cart:7", timeout=2)`, or another lockable.

    A client that disconnects while its request waits gives up its place, and the request ends with status 499. A loss
    cancels the body, and LeaseLost leaves it; with `cancels=False` LeaseLost is raised when the body has ended. Raises
    what `acquire()` raises. The watch ends when 64 KiB of a body have arrived that nobody has read.
    """
    async with AsyncExitStack() as stack:
        async with _while_connected(request):
            lease = await lock.acquire()
        if cancels:
            await stack.enter_async_context(lease)
        else:
            stack.push_async_exit(lease)  # its end without its beginning: nothing is cancelled
        yield lease


@asynccontextmanager
async def _while_connected(request: Request) -> AsyncGenerator[None]:
    """Interrupt the body, which waits for a lock, when the client disconnects."""
    loop = asyncio.get_running_loop()
    read: list[MutableMapping[str, Any]] = []
    watch: asyncio.Task[None] | None = None
    patience = asyncio.timeout(None)

    def begin() -> None:
        nonlocal watch
        watch = loop.create_task(_disconnected(request, read, patience), name="interlock-disconnect")

    timer = loop.call_later(WATCH_AFTER, begin)
    try:
        async with patience:
            yield
    except TimeoutError:
        if not patience.expired():
            raise
        raise HTTPException(CLIENT_GONE, "the client has gone") from None
    finally:
        timer.cancel()
        if watch is not None:
            watch.cancel()
        if read:
            _give_back(request, read)


async def _disconnected(request: Request, read: list[MutableMapping[str, Any]], patience: asyncio.Timeout) -> None:
    """Wait until the client is gone, and end the wait for the lock. Keeps in `read` all messages."""
    size = 0
    while size <= READ_AHEAD:
        read.append(message := await request.receive())
        if message["type"] == "http.disconnect":
            patience.reschedule(0)
            return
        size += len(message.get("body", b""))


def _give_back(request: Request, read: list[MutableMapping[str, Any]]) -> None:
    """Let the request receive these messages again."""
    receive = request.receive

    async def again() -> MutableMapping[str, Any]:
        return read.pop(0) if read else await receive()

    request._receive = again  # pyright: ignore[reportPrivateUsage]  # `receive` can't be assigned


# Jobs of a leader


def leading(
    work: Work,
    *,
    name: str,
    target: str | Interlock | Callable[[], Interlock] | None = None,
    **options: Unpack[Options],
) -> Lifespan:
    """Return a lifespan in which one process of all runs `work`.

    Put it into that of the app, `interlocked(url, leading(work, name="shop:jobs"))`. Alone it opens an Interlock at
    `target` by itself.

    `work` is an `async def work(lease)`, which a loss of the lead and the end of the app cancel. Or it has `start()`
    and `stop()`, which are called when this process begins and ceases to lead, and awaited if they are `async def`.
    `name` is that of the election, the same in all processes. `options` are as for `Interlock.election`: a process that
    died is replaced within `ttl` + 1 seconds. If `work` raises, that is logged, and this process campaigns again 5 s
    later; if it returns, this process gives up the lead for good. Raises ConfigError.
    """
    run = _checked_work(work)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[State | None]:
        async with AsyncExitStack() as stack:
            state: State | None = None
            if (locks := _running.get(app)) is None:
                state = await stack.enter_async_context(lifespan_of(target, ())(app))
                locks = _running[app]
            stop = asyncio.Event()
            election = locks.election(name, **options)
            campaign = asyncio.create_task(_lead(election.run, run, stop, name), name=f"interlock-leading {name}")
            try:
                yield state
            finally:
                stop.set()
                await campaign

    return lifespan


async def _lead(campaign: Callable[..., Awaitable[object]], work: object, stop: asyncio.Event, name: str) -> None:
    while not stop.is_set():
        try:
            await campaign(work, stop=stop)
        except Exception:  # noqa: BLE001  # whatever the user's work raises
            log.exception("leading %r: the work failed. This process campaigns again in %g s", name, CAMPAIGN_PAUSE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CAMPAIGN_PAUSE)
        else:
            return


def _checked_work(work: object) -> Callable[[Leadership], Awaitable[object]]:
    """What `Election.run` calls. Raises ConfigError."""
    if isinstance(work, Startable):
        return _between_start_and_stop(work)
    if inspect.iscoroutinefunction(work):
        return work
    if hasattr(work, "add_job"):
        raise ConfigError(
            f"leading(): {work!r} forgets its jobs when it is shut down. Pause it instead: `lifespan=interlocked(url, "
            "lambda app: Leading(scheduler, election))`, with Leading of interlock.contrib.apscheduler"
        )
    raise ConfigError(f"leading(): {work!r} must be an `async def work(lease)`, or have start() and stop()")


def _between_start_and_stop(thing: Startable) -> Callable[[Leadership], Awaitable[object]]:
    async def work(_: Leadership) -> None:
        await _awaited(thing.start())
        try:
            await asyncio.Event().wait()  # until this is cancelled
        finally:
            await _awaited(thing.stop())

    return work


async def _awaited(result: object) -> None:
    if inspect.isawaitable(result):
        await result
