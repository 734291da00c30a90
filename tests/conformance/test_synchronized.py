"""Decorated functions: each call runs under the lock that its arguments name."""

from __future__ import annotations

import pickle

import pytest

import interlock
import interlock.aio
import interlock.errors
from harness.modes import outcome, real
from interlock import AcquireTimeout, ConfigError, LeaseLost, Skipped, Unavailable
from interlock._api.synchronized import CallName
from interlock.primitives.lock import lock_resource

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")


class Shop:
    """A method to decorate, and attributes to name it by."""

    def __init__(self, number: int) -> None:
        self.number = number


class Both:
    """A decorated function that returns which of some names are held, in either mode."""

    def __init__(self, mode, template: str, url: str | None = None, **options) -> None:
        self.mode = mode
        self.locks = mode.interlock(*([url] if url else []))
        self.real = getattr(self.locks, "_real", self.locks)
        self.decorate = self.real.synchronized(template, **options)

    def looking(self, *names: str):
        """A function that calls the decorated one, which returns the names that are held."""
        if self.mode.name == "threads":

            @self.decorate
            def call(user_id=7, *rest, shop=None, **others):
                """Text."""
                return [name for name in names if self.real.lock(name).inspect().held]

            return lambda *args, **kwargs: self.mode.in_thread(call, *args, **kwargs)

        @self.decorate
        async def acall(user_id=7, *rest, shop=None, **others):
            """Text."""
            return [name for name in names if (await self.real.lock(name).inspect()).held]

        return acall


@rule(1)
@pytest.mark.runs_on("each server", full="every combination")
async def test_the_name_is_formatted_from_the_arguments(mode):
    call = Both(mode, "report:{user_id}").looking("report:7", "report:8", "report:x")
    assert await call() == ["report:7"]
    assert await call(8) == ["report:8"]
    assert await call(user_id="x") == ["report:x"]
    assert await call(8, 9, 10) == ["report:8"]
    shop = Both(mode, "shop:{shop.number:03}:{rest[0]}:{extra}").looking("shop:012:a:b")
    assert await shop(1, "a", shop=Shop(12), extra="b") == ["shop:012:a:b"]
    tagged = Both(mode, "stock:{{{user_id}}}").looking("stock:{5}")
    assert await tagged(5) == ["stock:{5}"]


async def test_methods_and_attributes_can_name_the_lock(mode):
    locks = mode.interlock()
    real = getattr(locks, "_real", locks)
    if mode.name == "threads":

        class Store(Shop):
            @real.synchronized("store:{self.number}:{item}")
            def sell(self, item: str) -> bool:
                return real.lock(f"store:{self.number}:{item}").inspect().held

            @classmethod
            @real.synchronized("class:{cls.__name__}")
            def count(cls) -> bool:
                return real.lock("class:Store").inspect().held

        assert await mode.in_thread(Store(3).sell, "tea")
        assert await mode.in_thread(Store.count)
    else:

        class AsyncStore(Shop):
            @real.synchronized("store:{self.number}:{item}")
            async def sell(self, item: str) -> bool:
                return (await real.lock(f"store:{self.number}:{item}").inspect()).held

        assert await AsyncStore(3).sell(item="tea")
    assert not (await locks.lock("store:3:tea").inspect()).held


async def test_a_missing_argument_is_an_error_at_the_call_that_names_it(mode):
    both = Both(mode, "report:{account}")
    call = both.looking()
    for attempt in (call(), call(3)):
        error = await outcome(attempt)
        assert isinstance(error, ConfigError)
        assert "'account'" in str(error)
        assert "user_id" in str(error)  # what it has
    assert await call(account=4) == []
    assert isinstance(await outcome(Both(mode, "shop:{shop.number}").looking()()), ConfigError)
    with pytest.raises(TypeError):
        await Both(mode, "{user_id}").looking()(1, user_id=2)


async def test_what_a_user_types_is_encoded_and_never_an_error(mode):
    """So that a request with a strange name does not end in a 500."""
    names = {
        "a\nb": "u:a%0Ab",
        "}{": "u:%7D%7B", "{7}": "u:%7B7%7D", "x{y": "u:x%7By", "\x85": "u:%C2%85", "\ud800": "u:%ED%A0%80",
        "é:50% /": "u:é:50% /", "": "u:", 7: "u:7", None: "u:None",
    }  # fmt: skip
    for typed, name in names.items():
        assert await Both(mode, "u:{user_id}").looking(name)(typed) == [name], typed
    assert await Both(mode, "{user_id}").looking("%")("") == ["%"]

    def function(x, y):
        return x, y

    made = set()
    for typed in ("ü" * 300 + "a", "ü" * 300 + "b", "{" * 600, "\udfff" * 600):
        call = CallName("stock:{{{x}}}:{y}", function, for_asyncio=False, prefix="lock:")
        made.add(call.of((typed, "short"), {}))
    assert len(made) == 4
    for name in made:
        assert lock_resource(name, "lock:").name == name
        assert name.startswith("stock:{")
        assert name.endswith("}:short")
    assert await Both(mode, "u:{user_id}").looking()("x" * 10_000) == []


async def test_a_function_makes_the_name_of_arguments_that_it_names(mode):
    call = Both(mode, lambda user_id, *, n=1, shop=None: f"report:{user_id}:{shop}"[::n]).looking("report:7:x")
    assert await call(shop="x") == ["report:7:x"]
    assert await Both(mode, lambda **them: "-".join(map(str, them))).looking("user_id-rest-shop-a")(a=1)
    assert await Both(mode, lambda: "constant").looking("constant")() == ["constant"]
    for wrong in (None, "", object()):
        assert isinstance(await outcome(Both(mode, lambda _w=wrong: _w).looking()()), ConfigError)
    assert isinstance(await outcome(Both(mode, lambda account: account).looking()()), ConfigError)

    async def coroutine():
        return "a"

    def plain(user_id): ...

    async def aplain(user_id): ...

    decorate = real(mode.interlock()).synchronized
    function = plain if mode.name == "threads" else aplain
    for wrong in (
        coroutine,
        lambda *args: args[0],
        lambda account: account,
        "a:{account}",
        "a\nb",
        "{{{user_id}",
        "x" * 500 + "{user_id}",
    ):
        with pytest.raises(ConfigError):
            decorate(wrong)(function)


async def test_the_address_of_an_object_is_refused_in_a_name(mode):
    """Another one in each process: the lock would exclude nobody."""
    for value in (object(), [object()], Shop, Shop(1), lambda: None):
        for template in ("a:{user_id}", "a:{user_id!r}", "a:{user_id!s:>100}"):
            error = await outcome(Both(mode, template).looking()(value))
            if value is Shop:
                assert error == []  # it has a name
            else:
                assert isinstance(error, ConfigError), template
                assert "address" in str(error)
    assert await Both(mode, "{user_id}").looking("< at 0xabcdef>")("< at 0xabcdef>")  # typed by a user


def test_a_hash_tag_that_names_an_argument_is_refused(mode):
    """All calls would share the lock "report:{user_id}"."""
    locks = real(mode.interlock())

    def plain(user_id): ...

    async def aplain(user_id): ...

    function = plain if mode.name == "threads" else aplain
    for lock in (
        locks.lock("report:{user_id}"), locks.semaphore("s:{user_id}", 2),
        locks.multi(locks.lock("a"), locks.lock("{user_id.number}")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="synchronized"):
            lock(function)
    locks.lock("report:{user}")(function)
    with pytest.raises(ConfigError, match="synchronized"):
        locks.lock("report:{user_id}:{month}")


@rule(1)
@pytest.mark.runs_on("each server", full="every combination")
async def test_a_call_of_a_busy_name_waits_raises_or_skips(mode):
    locks = mode.interlock()
    held = await locks.lock("a").acquire()
    assert isinstance(await outcome(Both(mode, "a", timeout=0.5).looking()()), AcquireTimeout)
    raised = await outcome(Both(mode, "a", busy="raise").looking()())
    assert isinstance(raised, AcquireTimeout)
    assert raised.holder == held.token
    skipped = await Both(mode, "a", busy="skip").looking()()
    assert isinstance(skipped, Skipped)
    assert not skipped
    assert skipped.by == held.token
    await held.release()
    assert await Both(mode, "a", busy="skip").looking("a")() == ["a"]


class Response:
    """As those of Starlette and Flask, which are applications, too."""

    def __call__(self, *scope_receive_send):
        raise AssertionError(scope_receive_send)  # it is a value here


async def test_a_call_of_a_busy_name_returns_a_value_or_what_a_function_says(mode):
    held = await mode.interlock().lock("a").acquire()
    response = Response()

    async def asks(skipped):
        return skipped.by

    for busy, result in (
        (response, response), (None, None), (429, 429), ((lambda skipped: skipped.by), held.token),
        ((lambda skipped: (skipped.name, skipped.quarantined)), ("a", False)),
        *([(asks, held.token)] if mode.name == "asyncio" else []),
    ):  # fmt: skip
        assert await Both(mode, "a", busy=busy).looking()() == result
    error = await outcome(Both(mode, "a", busy="raise").looking()())
    assert (error.name, error.holder, error.waited, error.quarantined) == ("a", held.token, 0, False)
    error = await outcome(Both(mode, "a", timeout=0.5).looking()())
    assert (error.name, error.holder, error.waited, error.quarantined) == ("a", held.token, 0.5, False)
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.name, copied.holder, copied.waited, str(copied)) == ("a", held.token, 0.5, str(error))
    await held.release()
    assert await Both(mode, "a", busy=response).looking("a")() == ["a"]
    for wrong in ("maybe", ValueError, ValueError("x")):
        with pytest.raises(ConfigError, match="busy"):
            real(mode.interlock()).synchronized("a", busy=wrong)


async def test_a_quarantine_is_seen_in_the_error_and_in_the_skipped(mode, node, client):
    """The marker is what a server leaves in the key while it is not sure; a server older than max_ttl is."""
    client.set("lock:a", "!quarantine:someone", px=30_000)
    for options in ({"timeout": 0.5}, {"busy": "raise"}):
        error = await outcome(Both(mode, "a", node.url, **options).looking()())
        assert isinstance(error, AcquireTimeout)
        assert (error.name, error.holder, error.quarantined) == ("a", None, True), error
    skipped = await Both(mode, "a", node.url, busy="skip").looking()()
    assert (skipped.name, skipped.by, skipped.quarantined) == ("a", None, True)


async def test_errors_name_the_lock(mode):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    for waiting in (
        locks.multi(locks.lock("a"), locks.lock("b")).acquire(0.1), locks.multi(locks.lock("a")).acquire(0),
        locks.latch("a, b", 1).wait(0.1), locks.lock("a").acquire(0), locks.semaphore("a", 2).acquire(timeout=0),
    ):  # fmt: skip
        error = await outcome(waiting)
        assert error.name in {"a", "a, b"}, error
    lease = await locks.lock("c").acquire()
    await lease.release()
    with pytest.raises(LeaseLost) as lost:
        lease.ensure()
    assert (lost.value.name, lost.value.token) == ("c", lease.token)
    away = await outcome(mode.interlock("redis://localhost:1", try_for=0.1).lock("a").acquire(0))
    assert isinstance(away, Unavailable)
    assert away.name == "a"
    for name in ("AcquireTimeout", "BrokenBarrier", "ConfigError", "LeaseLost", "LockError", "Unavailable"):
        assert getattr(interlock, name) is getattr(interlock.aio, name) is getattr(interlock.errors, name)
        assert name in interlock.aio.__all__


async def test_a_call_inside_a_call_goes_on(mode):
    """A thread or task never waits for itself, as with synchronized in Java."""
    locks = mode.interlock()
    real = getattr(locks, "_real", locks)
    if mode.name == "threads":

        @real.synchronized("tree:{root}", timeout=5)
        def depth(root: str, left: int) -> int:
            return 1 + depth(root, left - 1) if left else 0

        assert await mode.in_thread(depth, "x", 5) == 5
    else:

        @real.synchronized("tree:{root}", timeout=5)
        async def adepth(root: str, left: int) -> int:
            return 1 + await adepth(root, left - 1) if left else 0

        assert await adepth("x", 5) == 5
    assert not (await locks.lock("tree:x").inspect()).held


async def test_an_error_of_the_function_is_raised_and_the_lock_is_free(mode):
    both = Both(mode, "a")
    if mode.name == "threads":

        @both.decorate
        def fails():
            """Fails."""
            raise KeyError("user_id")

        with pytest.raises(KeyError, match="user_id"):
            await mode.in_thread(fails)
        assert fails.__doc__ == "Fails."
    else:

        @both.decorate
        async def afails():
            raise KeyError("user_id")

        with pytest.raises(KeyError, match="user_id"):
            await afails()
    assert not (await both.locks.lock("a").inspect()).held


def test_bad_templates_and_options_are_refused(mode):
    locks = mode.interlock()
    real = getattr(locks, "_real", locks)

    def plain(user_id): ...

    async def coroutine(user_id): ...

    def generator(user_id):
        yield

    right, wrong = (plain, coroutine) if mode.name == "threads" else (coroutine, plain)
    for template, options, function in (
        ("a{", {}, right), ("{}", {}, right), ("{0}", {}, right), (7, {}, right), ("a", {}, wrong),
        ("a", {}, generator), ("a", {}, "x"), ("a", {}, classmethod(right)), ("a", {"busy": "maybe"}, right),
        ("a", {"busy": "skip", "timeout": 5}, right), ("a", {"ttl": -1}, right),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            real.synchronized(template, **options)(function)
    with pytest.raises(TypeError):
        real.synchronized("a", nonsense=1)
