"""The dependency, the lifespan and the answers, in one process: names, errors at the start, what OpenAPI shows.

test_fastapi_servers.py starts real servers. This file also runs with the oldest FastAPI of the extra. It has no
`from __future__ import annotations`: FastAPI could not look up names that are local to a test.
"""

import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Annotated

import fastapi
import pytest
from fastapi import APIRouter, Cookie, Depends, FastAPI, Header, Query, Request, WebSocket
from fastapi import Path as InPath
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Starlette would like another client
    from fastapi.testclient import TestClient

import interlock
from interlock.contrib import starlette as for_starlette
from interlock.contrib.fastapi import Interlock, Lease, Locks, answers, interlocked, leading, locked, responses
from interlock.errors import ConfigError

SAYS_WHEN = "scope" in Depends.__code__.co_varnames
OLDEST = Path(sys.prefix) / "fastapi-oldest"


def started(app):
    """Start the app, and stop it."""
    with TestClient(app):
        pass


def made(url, **kwargs):
    return FastAPI(lifespan=interlocked(url), exception_handlers=answers(), **kwargs)


@pytest.fixture
def app(server):
    """An app with the endpoints whose names the tests look at."""
    app = made(server.url, responses=responses())

    @app.get("/path/{user_id}")
    async def path(user_id: int, lease: Annotated[Lease, locked("cart:{user_id}")]):
        return lease.name

    @app.get("/thread/{user_id}")
    def thread(user_id: int, lease: Annotated[Lease, locked("cart:{user_id}")]):
        lease.ensure()
        return lease.name

    @app.get("/undeclared/{user_id}")
    async def undeclared(lease: Annotated[Lease, locked("raw:{user_id}")]):
        return lease.name

    @app.get("/mixed/{shop}")
    async def mixed(
        shop: Annotated[str, InPath(min_length=2)],
        x_tenant: Annotated[str, Header()],
        number: Annotated[int, Query(alias="n")],
        lease: Annotated[Lease, locked("{shop}:{x_tenant}:{number}:{session}")],
        session: Annotated[str, Cookie()] = "none",
    ):
        return lease.name

    def name_of(user_id: int, x_tenant: Annotated[str, Header()]) -> str:
        return f"made:{x_tenant}:{user_id}"

    @app.get("/function/{user_id}")
    async def function(lease: Annotated[Lease, locked(name_of)]):
        return lease.name

    class Order(BaseModel):
        id: int

    async def name_of_order(order: Order) -> str:
        return f"order:{order.id}"

    @app.post("/body")
    async def body(order: Order, lease: Annotated[Lease, locked(name_of_order)]):
        return {"name": lease.name, "id": order.id}

    Cart = Annotated[Lease, locked("shared:{user_id}")]

    async def items(user_id: int, lease: Cart):
        return lease.fence

    @app.get("/shared/{user_id}")
    async def shared(lease: Cart, fence: Annotated[int, Depends(items)]):
        return {"name": lease.name, "same": lease.fence == fence}

    @app.get("/held/{user_id}")
    async def held(user_id: int, locks: Locks, lease: Annotated[Lease, locked("held:{user_id}")]):
        return locks.assert_held(f"held:{user_id}").fence == lease.fence

    router = APIRouter(prefix="/tenants/{tenant}", dependencies=[locked("tenant:{tenant}", timeout=0.2)])

    @router.get("/held")
    async def of_tenant(tenant: str, locks: Locks):
        return locks.assert_held(f"tenant:{tenant}").name

    app.include_router(router)
    mounted = FastAPI(exception_handlers=answers())

    @mounted.get("/{key}")
    async def in_mounted(key: str, lease: Annotated[Lease, locked("{base}:{key}")]):
        return lease.name

    app.mount("/mounted/{base}", mounted)
    return app


@pytest.mark.parametrize(
    ("path", "headers", "name"),
    [
        ("/path/7", {}, "cart:7"),
        ("/path/007", {}, "cart:7"),  # one int to the endpoint, and so one lock
        ("/thread/+7", {}, "cart:7"),
        ("/undeclared/007", {}, "raw:007"),
        ("/mixed/ab?n=07", {"x-tenant": "acme"}, "ab:acme:7:none"),
        ("/mixed/ab?n=7", {"x-tenant": "a{b}\x7f", "cookie": "session=s1"}, "ab:a%7Bb%7D%7F:7:s1"),
        ("/function/7", {"x-tenant": "acme"}, "made:acme:7"),
        ("/mounted/shop/42", {}, "shop:42"),
        ("/tenants/acme/held", {}, "tenant:acme"),
    ],
)
def test_a_name_is_made_of_the_parameters_as_the_endpoint_has_them(app, path, headers, name):
    with TestClient(app) as client:
        answer = client.get(path, headers=headers)
    assert (answer.status_code, answer.json()) == (200, name)


def test_a_name_can_be_made_of_the_body_and_a_lease_shared(app):
    with TestClient(app) as client:
        assert client.post("/body", json={"id": 3}).json() == {"name": "order:3", "id": 3}
        assert client.get("/shared/5").json() == {"name": "shared:5", "same": True}
        assert client.get("/held/5").json() is True


@pytest.mark.parametrize(
    ("path", "where"), [("/path/x", ["path", "user_id"]), ("/mixed/ab?n=1", ["header", "x-tenant"])]
)
def test_a_bad_parameter_in_the_name_is_422_without_a_lock(app, path, where):
    with TestClient(app) as client:
        answer = client.get(path)
    assert answer.status_code == 422
    assert where in [error["loc"] for error in answer.json()["detail"]]


@pytest.mark.parametrize("path", ["/path/9", "/thread/9"])
def test_a_busy_name_is_423_or_409(server, path, app):
    with interlock.Interlock(server.url) as locks, TestClient(app) as client:
        lease = locks.lock("tenant:acme").acquire()
        answer = client.get("/tenants/acme/held")
        assert (answer.status_code, answer.headers["retry-after"]) == (423, "1")
        lease.release()
        assert client.get("/tenants/acme/held").status_code == 200
    other = FastAPI(lifespan=interlocked(server.url), exception_handlers=answers(busy=409))

    @other.get("/", dependencies=[locked("one", timeout=0)])
    async def endpoint():
        return "had it"

    with interlock.Interlock(server.url) as locks, TestClient(other) as client:
        lease = locks.lock("one").acquire()
        assert client.get("/").status_code == 409
        lease.release()
        assert client.get("/").json() == "had it"


def test_what_depends_on_the_lease_ends_before_it_and_what_has_the_default_scope_after_it(server):
    """So a session commits under the lock only in a dependency of the scope of the function, which has the lease."""
    app, ended = made(server.url), []
    One = Annotated[Lease, locked("one")]

    async def session(lease: One):
        yield
        ended.append(f"session {lease.state}")

    leases = []

    async def default():
        yield
        ended.append(f"default {leases[0].state}")

    scope = {"scope": "function"} if SAYS_WHEN else {}

    @app.get("/", dependencies=[Depends(default)])
    async def endpoint(lease: One, _: Annotated[None, Depends(session, **scope)]):
        leases.append(lease)

    with TestClient(app) as client:
        assert client.get("/").status_code == 200
    assert ended == ["session held", "default released"]


def test_openapi_shows_the_answers_and_no_parameter_twice(app):
    with TestClient(app) as client:
        paths = client.get("/openapi.json").json()["paths"]
    operation = paths["/mixed/{shop}"]["get"]
    assert sorted(each["name"] for each in operation["parameters"]) == ["n", "session", "shop", "x-tenant"]
    assert "application/problem+json" in operation["responses"]["423"]["content"]
    assert "Retry-After" in operation["responses"]["503"]["headers"]


def an_app(url, template, *, path="/carts/{user_id}", **options):
    app = made(url)

    class Order(BaseModel):
        id: int

    @app.post(path)
    async def pay(user_id: int, order: Order, lease: Annotated[Lease, locked(template, **options)]):
        return lease.name

    return app


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        (
            "cart:{user}",
            {},
            r"/carts/\{user_id\}: locked\('cart:\{user\}'\): the name needs 'user', but .*pay.* has no",
        ),
        ("order:{order.id}", {}, "'order' of .*pay.* is in the body. Name a dependency"),
        ("cart:{user_id}", {"ttl": 0}, "ttl"),
        ("cart:{user_id}", {"ttl": 31}, "max_ttl"),
        ("cart:{user_id}", {"timeout": -1}, "timeout"),
    ],
)
def test_what_no_request_could_use_ends_the_start(server, template, options, says):
    with pytest.raises(ConfigError, match=says):
        started(an_app(server.url, template, **options))


def test_the_same_is_found_in_routers_and_mounted_apps(server):
    for put in ("include", "mount"):
        app, inner = made(server.url), FastAPI() if put == "mount" else APIRouter()

        @inner.get("/{number}")
        async def endpoint(number: int, lease: Annotated[Lease, locked("{nmber}")]): ...

        app.mount("/in", inner) if put == "mount" else app.include_router(inner, prefix="/in")
        with pytest.raises(ConfigError, match=r"/in/\{number\}: locked\('\{nmber\}'\): the name needs 'nmber'"):
            started(app)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cart:{}", {}, "the fields of the name are arguments"),
        ("cart:{user_id", {}, "no valid format"),
        ("", {}, "name"),
        (7, {}, "must be a str or a dependency"),
        ("x", {"scope": "session"}, "scope must be"),
    ],
)
def test_a_bad_name_or_scope_is_refused_at_once(name, options, says):
    with pytest.raises(ConfigError, match=says):
        locked(name, **options)


def test_one_name_twice_in_an_endpoint_is_refused_at_the_start(server):
    app = made(server.url)

    async def items(lease: Annotated[Lease, locked("cart:{user_id}")]): ...

    @app.get("/{user_id}")
    async def endpoint(
        user_id: int, lease: Annotated[Lease, locked("cart:{user_id}")], _: Annotated[None, Depends(items)]
    ): ...

    with pytest.raises(ConfigError, match="twice.*would wait for itself.*share one Annotated"):
        started(app)


@pytest.mark.skipif(not SAYS_WHEN, reason="in this FastAPI a generator is no stream")
def test_a_generator_whose_lease_would_end_before_its_first_item_is_refused(server):
    app = made(server.url)

    @app.get("/")
    async def stream(lease: Annotated[Lease, locked("x")]):
        yield 1

    with pytest.raises(ConfigError, match=r"stream\(\) is a generator.*scope='request'"):
        started(app)


@pytest.mark.skipif(not SAYS_WHEN, reason="in this FastAPI a generator is no stream")
def test_a_generator_keeps_its_lease_with_the_scope_of_the_request(server):
    app = made(server.url)

    @app.get("/")
    async def stream(lease: Annotated[Lease, locked("x", scope="request")]):
        for _ in range(2):
            yield str(lease.state)

    with TestClient(app) as client:
        assert [json.loads(line) for line in client.get("/").text.split()] == ["held", "held"]


@pytest.mark.skipif(SAYS_WHEN, reason="this FastAPI has scopes")
def test_an_older_fastapi_says_what_it_lacks():
    with pytest.raises(ConfigError, match="needs FastAPI 0.121"):
        locked("x", scope="request")


def test_a_websocket_is_refused_in_words(server):
    app = made(server.url)

    @app.websocket("/{room}")
    async def endpoint(websocket: WebSocket, room: str, lease: Annotated[Lease, locked("{room}")]): ...

    with pytest.raises(ConfigError, match="is for HTTP. In a websocket endpoint"):
        started(app)


def test_an_app_without_answers_is_warned_of(server, caplog):
    app = FastAPI(lifespan=interlocked(server.url))

    @app.get("/", dependencies=[locked("x")])
    async def endpoint(): ...

    with caplog.at_level(logging.WARNING, "interlock"):
        started(app)
    assert "exception_handlers=answers()" in caplog.text
    caplog.clear()
    app.add_exception_handler(interlock.AcquireTimeout, lambda *_: PlainTextResponse("busy"))
    with caplog.at_level(logging.WARNING, "interlock"):
        started(app)
    assert not caplog.text


def test_an_app_without_its_lifespan_is_told_what_it_lacks(server):
    app = FastAPI()

    @app.get("/", dependencies=[locked("x")])
    async def endpoint(): ...

    with TestClient(app) as client, pytest.raises(ConfigError, match="no open Interlock.*interlocked"):
        client.get("/")


def test_an_app_started_twice_is_refused_and_one_started_again_is_not(app, server):
    with TestClient(app), pytest.raises(ConfigError, match="runs already in this process"):
        started(app)
    started(app)
    if not SAYS_WHEN:
        return  # this FastAPI does not start the lifespans of routers
    nested = made(server.url)
    router = APIRouter(lifespan=interlocked(server.url))
    nested.include_router(router)
    with pytest.raises(ConfigError, match="runs already.*not in that of a router"):
        started(nested)


def test_a_target_may_be_a_function_or_an_interlock_but_none_for_threads(server):
    async def name(locks: Locks):
        return locks.prefix

    for target in (lambda: Interlock(server.url, prefix="shop:"), Interlock(server.url, prefix="shop:")):
        app = FastAPI(lifespan=interlocked(target))
        app.get("/")(name)
        with TestClient(app) as client:
            assert client.get("/").json() == "shop:"
    with interlock.Interlock(server.url) as locks, pytest.raises(ConfigError, match="is for threads"):
        started(FastAPI(lifespan=interlocked(locks)))
    with pytest.raises(ConfigError):
        started(FastAPI(lifespan=interlocked("http://nowhere")))


def test_leading_refuses_what_it_cannot_run():
    class Scheduler:
        def add_job(self): ...

    for work, says in ((Scheduler(), "contrib.apscheduler"), (print, "must be an `async def work"), (3, "must be")):
        with pytest.raises(ConfigError, match=says):
            leading(work, name="x")


def test_leading_alone_opens_an_interlock_and_leads(server):
    led = []

    async def work(lease):
        led.append(lease.name)

    app = FastAPI(lifespan=leading(work, name="jobs", target=server.url), exception_handlers=answers())

    @app.get("/")
    async def endpoint(lease: Annotated[Lease, locked("x")]):
        return len(led)

    with TestClient(app) as client:
        while not client.get("/").json():
            pass
    assert led == ["jobs"]


def test_plain_starlette_holds_a_lock_for_a_request(server):
    async def pay(request: Request):
        locks = for_starlette.interlock_of(request)
        name = f"cart:{request.path_params['user_id']}"
        async with for_starlette.held(request, locks.lock(name, timeout=0.1)) as lease:
            return PlainTextResponse(lease.name)

    app = Starlette(
        routes=[Route("/{user_id:int}", pay)],
        lifespan=for_starlette.interlocked(server.url),
        exception_handlers=for_starlette.answers(),
    )
    with TestClient(app) as client, interlock.Interlock(server.url) as locks:
        assert client.get("/007").text == "cart:7"
        lease = locks.lock("cart:7").acquire()
        assert client.get("/7").status_code == 423
        lease.release()


@pytest.mark.skipif(bool(os.environ.get("OLD_FASTAPI")), reason="this is that run")
@pytest.mark.skipif(not OLDEST.exists(), reason="scripts/test frameworks installs the oldest FastAPI")
def test_all_of_this_holds_with_the_oldest_fastapi():
    path = os.pathsep.join([str(OLDEST), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore", __file__],
        env={**os.environ, "PYTHONPATH": path, "OLD_FASTAPI": "1"}, capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(not os.environ.get("OLD_FASTAPI"), reason="only in that run")
def test_this_is_the_oldest_fastapi():
    assert fastapi.__version__.startswith("0.110."), fastapi.__file__
