"""The lock: what DESIGN sections 1 and 2 promise."""

from __future__ import annotations

import asyncio
import enum
import gc
import time
import warnings

import pytest

from harness.clock import machine_time
from harness.matrix import WAYS
from harness.modes import is_subscribed, outcome, queued, real, until
from interlock import AcquireTimeout, ConfigError, LeaseLost, LeaseState, LockError
from interlock._protocol.run_to_end import run

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("each server and way", full="every combination", quorum=True)
# Of a test that waits for the time of a server: by which way the client reaches it makes no difference.
of_the_server = pytest.mark.runs_on("each server", full="every combination")


async def held_by(lock, lease) -> bool:
    return (await lock.inspect()).holder == lease.token


# Acquiring and releasing


@rule(1)
async def test_one_holder_at_a_time(mode):
    lock = mode.interlock().lock("a")
    lease = await lock.acquire()
    assert await mode.interlock().lock("a").try_acquire() is None
    assert await lease.release()
    again = await mode.interlock().lock("a").try_acquire()
    assert again is not None
    await again.release()


async def test_a_lease_has_its_name_token_fence_and_remaining_time(mode, clean):
    locks = mode.interlock(label="till 3")
    await locks.ping()  # connecting is not what this test measures
    lease = await locks.lock("stock:42", ttl=20).acquire()
    assert lease.name == "stock:42"
    assert clean.get("lock:stock:42").decode() == lease.token
    who, pid, *_, random = lease.token.split("/")
    assert who.startswith("till-3@")
    assert pid.isdecimal()
    assert len(random) == 32
    assert 19 < lease.remaining() < 20
    assert lease.state is LeaseState.HELD
    lease.ensure()
    await lease.release()
    assert lease.state is LeaseState.RELEASED
    assert lease.remaining() == 0


@rule(8)
async def test_release_twice_is_one_release(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    assert await lease.release()
    assert not await lease.release()
    with pytest.raises(LeaseLost, match="'a' has ended: it was released"):
        lease.ensure()


@rule(8)
async def test_a_release_sent_twice_is_no_loss(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    core = mode.session(locks).core
    message = (lease._grant.attempt, ("release", lease.token, 0), time.monotonic() + 1000)
    await lease.release()
    ask = core.requests.ask_until_answered(*message)
    (ours, _), _ = await ask if mode.name == "asyncio" else await mode.in_thread(lambda: run(ask))
    assert ours == 1


@rule(8)
async def test_an_acquire_sent_twice_is_the_same_grant(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    script = lease._grant.resource.script
    keys = lease._grant.resource.keys
    args = ("acquire", lease.token, 30000, 3000, 0, "nowhere", "inf", *lease._grant.resource.acquire_args, "")
    assert clean.eval(script.source, len(keys), *keys, *args) == [1, lease.fence]
    assert not clean.exists(keys[2])
    await lease.release()


@rule(7)
async def test_a_confirmation_on_a_server_that_took_over_gets_a_new_fence(mode, clean):
    """The primary before may have granted more since the handover, whose grant the replica has."""
    resource = (await mode.keep(mode.interlock().lock("other").acquire()))._grant.resource
    keys = [key.replace("other", "b") for key in resource.keys]

    def acquire(identity):
        args = ("acquire", "a/1", 30000, 3000, 0, "-", "inf", *resource.acquire_args, f"{identity} 0 2000 0 -")
        granted, fence = clean.eval(resource.script.source, len(keys), *keys, *args)
        assert granted == 1
        return fence

    before, after = "a" * 12 + ":" + "b" * 12, "c" * 12 + ":" + "d" * 12
    handed_over = acquire(before)
    assert acquire(before) == handed_over
    confirmed = acquire(after)
    assert confirmed > handed_over
    _, _, fence, identity, *_ = clean.get(keys[1]).decode().split()
    assert (int(fence), identity) == (confirmed, before)  # the identity stays, as evidence for others
    clean.delete(*keys)


async def test_try_acquire_of_a_held_lock_leaves_nothing_in_the_queue(mode, clean):
    locks = mode.interlock(registry=False)
    lease = await locks.lock("a").acquire()
    before = set(clean.scan_iter())
    assert await mode.interlock(registry=False).lock("a").try_acquire() is None
    assert set(clean.scan_iter()) == before
    await lease.release()


@rule(8)
async def test_a_timeout_leaves_nothing_in_the_queue_and_names_lock_and_holder(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    other = mode.interlock()
    await (await other.lock("warm").acquire()).release()  # connecting is not what the timeout is for
    started, machine = time.monotonic(), machine_time()
    error = await outcome(other.lock("a").acquire(timeout=0.2))
    assert isinstance(error, AcquireTimeout)
    assert isinstance(error, TimeoutError)
    assert "'a'" in str(error)
    assert lease.token in str(error)
    assert time.monotonic() - started >= 0.2 and machine_time() - machine < 5
    assert (await locks.lock("a").inspect()).waiting == 0
    await lease.release()
    assert not clean.exists("lock:a")


async def test_the_locks_own_timeout_is_the_default(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    assert isinstance(await outcome(locks.lock("a", timeout=0.05).acquire()), AcquireTimeout)
    assert isinstance(await outcome(locks.lock("a", timeout=0).acquire()), AcquireTimeout)
    waiting = asyncio.ensure_future(locks.lock("a", timeout=0.05).acquire(timeout=None))
    await until(lambda: queued(locks, 1))
    await lease.release()
    await (await waiting).release()


async def test_a_section_releases_even_when_its_body_fails(mode, clean):
    locks = mode.interlock()
    with pytest.raises(KeyError):
        async with await locks.lock("a").acquire():
            raise KeyError
    assert not clean.exists("lock:a")


async def test_a_body_may_release_by_itself(mode):
    async with await mode.interlock().lock("a").acquire() as lease:
        assert await lease.release()


async def test_a_lease_can_be_handed_to_another_task_or_thread(mode):
    lease = await mode.interlock().lock("a").acquire()
    assert await asyncio.create_task(lease.release())


# The queue


@rule(1)
async def test_release_hands_over_in_the_order_of_arrival(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    order, waiting = [], []

    async def wait(number: int) -> None:
        mine = await mode.interlock().lock("a", fair=True).acquire()
        order.append(number)
        await mine.release()

    for number in range(8):
        waiting.append(asyncio.ensure_future(wait(number)))
        await until(lambda number=number: queued(locks, number + 1))
    await lease.release()
    await asyncio.gather(*waiting)
    assert order == list(range(8))


@rule(1)
async def test_no_newcomer_overtakes(mode, clean):
    """Not even a newcomer that asks in the moment in which the key is absent."""
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(mode.interlock().lock("a").acquire())
    await until(lambda: queued(locks, 1))
    clean.delete("lock:a")  # as a foreign holder frees it: nobody is told
    assert await mode.interlock().lock("a").try_acquire() is None
    mine = await waiting
    assert await held_by(locks.lock("a"), mine)
    assert await mine.release()
    assert not await lease.release()


@rule(1)
async def test_one_script_call_skips_some_dead_waiters_and_the_next_call_goes_on(mode, clean):
    """1,200 dead waiters are ahead of a living one: more than one script may skip."""
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    _, _, queue, waiters, _ = lease._grant.resource.keys
    clean.zadd(queue, {f"dead/{i}": -2000 + i for i in range(1200)})
    clean.hset(waiters, mapping={f"dead/{i}": f"{i} 3000 0 nowhere" for i in range(1200)})
    clean.pexpire(queue, 9000)
    clean.pexpire(waiters, 9000)
    waiting = asyncio.ensure_future(mode.interlock().lock("a").acquire())
    await until(lambda: clean.zcard(queue) == 1201)
    await lease.release()
    mine = await waiting
    assert (await locks.lock("a").inspect()).waiting == 0
    await mine.release()


@rule(3)
async def test_a_lost_wake_up_costs_a_poll_and_no_hang(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    mode.session(others).dispatch_push = lambda _payload: None  # every message is lost
    waiting = asyncio.ensure_future(others.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    await lease.release()
    mine = await asyncio.wait_for(waiting, 5)
    await mine.release()


@rule(3)
async def test_a_push_that_arrives_twice_or_late_grants_nothing(mode):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    token = (await locks.lock("a").inspect()).waiters[0]
    for _ in range(3):
        mode.session(others).dispatch_push(f"granted {token}".encode())
    mode.session(others).dispatch_push(b"granted nobody")
    mode.session(others).dispatch_push(b"")
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert await held_by(locks.lock("a"), lease)
    await lease.release()
    mine = await waiting
    mode.session(others).dispatch_push(f"granted {token}".encode())
    await mine.release()


@rule(3)
@pytest.mark.not_on_a_cluster
async def test_a_new_subscription_makes_every_waiter_ask_again(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    await until(lambda: clean.pubsub_numsub(mode.session(others).channel)[0][1] == 1)
    heard = []
    session = mode.session(others)
    subscribed = session.subscribed
    session.subscribed = lambda: (heard.append(1), subscribed())
    for client in clean.client_list(_type="pubsub"):
        clean.client_kill_filter(_id=client["id"])
    await until(lambda: heard)
    await lease.release()
    await (await waiting).release()


@of_the_server
@rule(3)
async def test_a_dead_holder_is_followed_within_its_ttl_and_a_second(mode, clean):
    locks = mode.interlock()
    lock = locks.lock("a", ttl=1, renew=False)
    dead = await lock.acquire()
    started = machine_time()
    mine = await mode.interlock().lock("a").acquire(timeout=10)
    assert machine_time() - started < 2.5
    assert not await dead.release()
    await mine.release()


@of_the_server
@rule(4)
async def test_a_lock_handed_to_a_dead_waiter_is_free_again_in_seconds(mode, clean):
    """Not after the whole ttl of 30 s."""
    locks, dying = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    session = mode.session(dying)
    session.dispatch_push = lambda _payload: None
    session.waiters.tick = _nothing  # it heartbeats no more
    waiting = asyncio.ensure_future(outcome(dying.lock("a").acquire(timeout=20)))
    await until(lambda: queued(locks, 1))
    await until(lambda: is_subscribed(session))  # or it would ask once more, when it is
    after = asyncio.ensure_future(mode.interlock().lock("a").acquire())
    await until(lambda: queued(locks, 2))
    started = machine_time()
    await lease.release()
    mine = await after
    assert machine_time() - started < 6
    await mine.release()
    await dying.close()
    assert isinstance(await waiting, ConfigError)


async def _nothing() -> None:
    return None


@of_the_server
@rule(4)
async def test_a_waiter_that_sends_no_heartbeat_is_skipped(mode, clean):
    locks, dying = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    waiters = mode.session(dying).waiters
    heartbeat, waiters.tick = waiters.tick, _nothing
    waiting = asyncio.ensure_future(outcome(dying.lock("a").acquire(timeout=30)))
    await until(lambda: queued(locks, 1))
    token = (await locks.lock("a").inspect()).waiters[0]
    key = lease._grant.resource.keys[3]
    after = asyncio.ensure_future(mode.interlock().lock("a").acquire())
    await until(lambda: queued(locks, 2))
    await until(lambda: int(clean.hget(key, token).split()[0]) < clean.time()[0] * 1000)
    await lease.release()
    mine = await after
    assert not waiting.done()
    waiters.tick = heartbeat  # it comes back to life, and in again
    await mine.release()
    await (await waiting).release()


# Holding


@rule(6)
async def test_a_lease_is_renewed_as_long_as_it_is_held(mode):
    lease = await mode.interlock().lock("a", ttl=2.4).acquire()
    deadline = lease._grant.hold.deadline
    await until(lambda: lease._grant.hold.deadline > deadline + 1.5)  # twice
    lease.ensure()
    assert lease.state is LeaseState.HELD
    assert await lease.release()


@rule(6)
@pytest.mark.not_on_a_cluster
async def test_many_leases_are_renewed_in_one_call(mode, clean):
    locks = mode.interlock()
    # One after the other: 200 threads would each connect, which with TLS takes longer than the ttl on a busy machine.
    leases = [await locks.lock(f"many:{i}", ttl=6).acquire() for i in range(200)]
    before = clean.info("commandstats")["cmdstat_evalsha"]["calls"]
    first = [lease._grant.hold.deadline for lease in leases]
    await until(lambda: all(lease._grant.hold.deadline > was for lease, was in zip(leases, first, strict=True)))
    assert clean.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 20
    await asyncio.gather(*(lease.release() for lease in leases))


@of_the_server
@rule(6)
async def test_one_bad_key_does_not_delay_the_renewal_of_others(mode, clean):
    locks = mode.interlock()
    bad = await locks.lock("bad", ttl=2.4).acquire()
    good = await locks.lock("good", ttl=2.4).acquire()
    clean.delete("lock:bad")
    clean.lpush("lock:bad", 1)
    clean.expire("lock:bad", 60)
    await until(lambda: bad.state is LeaseState.JEOPARDY)
    await until(lambda: bad.state is LeaseState.LOST)
    good.ensure()
    assert await good.release()
    clean.delete("lock:bad")


@rule(6)
async def test_a_lease_with_renew_false_is_not_renewed_and_is_reported_lost_at_its_end(mode):
    told = []
    lease = await mode.interlock().lock("a", ttl=0.3, renew=False, on_lost=told.append).acquire()
    assert not lease.lost.is_set()
    await until(lease.lost.is_set)
    await until(lambda: told)
    assert lease.state is LeaseState.LOST
    assert lease.remaining() == 0
    with pytest.raises(LeaseLost, match="'a' .* is lost: its ttl passed"):
        lease.ensure()
    assert not await lease.release()


@rule(6)
async def test_a_lease_whose_key_vanished_is_lost_at_the_next_renewal(mode, clean):
    lease = await mode.interlock().lock("a", ttl=0.9).acquire()
    clean.flushall()
    await until(lease.lost.is_set)
    with pytest.raises(LeaseLost):
        lease.ensure()


@rule(6)
async def test_a_renewal_never_creates_a_key(mode, clean):
    lease = await mode.interlock().lock("a", ttl=0.9).acquire()
    clean.delete("lock:a")
    await until(lease.lost.is_set)
    assert not clean.exists("lock:a")


@rule(6)
async def test_renewal_ends_with_the_release(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a", ttl=0.3).acquire()
    await lease.release()
    clean.set("lock:a", lease.token, px=400)  # as if a late copy had come: a watchdog would keep it for ever
    await until(lambda: not clean.exists("lock:a"), within=3)


@of_the_server
async def test_max_hold_ends_the_lease_of_a_holder_that_hangs(mode, clean):
    started = time.monotonic()
    lease = await mode.interlock().lock("a", ttl=2, max_hold=3.0).acquire()
    await until(lease.lost.is_set, within=7)
    assert time.monotonic() - started > 2.9  # it was renewed beyond its ttl
    with pytest.raises(LeaseLost, match="max_hold"):
        lease.ensure()
    await until(lambda: not clean.exists("lock:a"), within=3)


@of_the_server
async def test_extend_lengthens_a_lease_and_renewal_does_not_shorten_it(mode, clean):
    locks = mode.interlock(max_ttl=50)
    lease = await locks.lock("a", ttl=3).acquire()
    await lease.extend(50)
    assert lease.remaining() > 45
    started = time.monotonic()
    await until(lambda: time.monotonic() - started > 1.3)  # when it is renewed
    assert clean.pttl("lock:a") > 30_000
    assert lease.remaining() > 30
    await lease.extend(1)
    assert clean.pttl("lock:a") > 30_000
    assert await lease.release()


async def test_extend_of_a_lost_lease_raises_and_creates_no_key(mode, clean):
    lease = await mode.interlock().lock("a").acquire()
    clean.delete("lock:a")
    assert isinstance(await outcome(lease.extend(10)), LeaseLost)
    assert not clean.exists("lock:a")
    assert lease.lost.is_set()


async def test_leaving_a_section_of_a_lost_lease_raises_lease_lost(mode, clean):
    with pytest.raises(LeaseLost, match="'a'"):
        async with await mode.interlock().lock("a").acquire():
            clean.delete("lock:a")


async def test_an_exception_of_the_body_is_never_replaced(mode, clean):
    with pytest.raises(KeyError) as caught:
        async with await mode.interlock().lock("a").acquire():
            clean.delete("lock:a")
            raise KeyError("mine")
    assert isinstance(caught.value.__context__, LeaseLost)


@of_the_server
@rule(6)
async def test_a_lease_that_is_dropped_without_release_warns_and_is_not_renewed(mode, clean):
    locks = mode.interlock()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await locks.lock("a", ttl=2).acquire()
        await until(lambda: gc.collect() >= 0 and caught)
    assert "'a': a lease was dropped without release" in str(caught[0].message)
    await until(lambda: not clean.exists("lock:a"), within=5)


# Fences and execute


@rule(7)
async def test_fences_grow_across_clients_releases_and_flushes(mode, clean):
    fences = []
    for _ in range(5):
        lease = await mode.interlock().lock("a").acquire()
        fences.append(lease.fence)
        await lease.release()
        clean.flushall()
    assert fences == sorted(set(fences))
    assert all(abs(fence / 1e6 - time.time()) < 60 for fence in fences)


@rule(7)
async def test_fences_grow_even_if_the_servers_clock_was_set_back(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    record = lease._grant.resource.keys[1]
    await lease.release()
    ahead = int((time.time() + 600) * 1e6)
    clean.set(record, f"1 lock {ahead} - 0 - - -", px=900_000)
    lease = await locks.lock("a").acquire()
    assert lease.fence == ahead + 1
    assert clean.pttl(record) > 600_000  # it outlives its own fence
    await lease.release()


@rule(9)
async def test_every_key_has_a_ttl_and_shares_the_slot(mode, clean):
    locks = mode.interlock(registry=False)
    lease = await locks.lock("a{b}c").acquire()
    plain = await locks.lock("plain").acquire()
    others = [mode.interlock(registry=False).lock(name) for name in ("a{b}c", "plain")]
    waiting = [asyncio.ensure_future(other.acquire()) for other in others]
    await until(lambda: queued(locks, 1, "a{b}c"))
    await until(lambda: queued(locks, 1, "plain"))
    assert all(clean.pttl(key) > 0 for key in list(clean.scan_iter()))
    for key in list(clean.scan_iter()):
        tag = key.decode().split("{", 1)[1].split("}", 1)[0] if b"{" in key else key.decode()
        assert tag in {"b", "lock:plain"}
    await lease.release()
    await plain.release()
    for future in waiting:
        await (await future).release()


async def test_execute_runs_a_command_only_while_the_lease_is_alive(mode, clean):
    lease = await mode.interlock().lock("a").acquire()
    assert await lease.execute("SET", "users:{lock:a}1", "ann") == b"OK"
    assert await lease.execute("GET", "users:{lock:a}1", keys=["users:{lock:a}1"]) == b"ann"
    assert await lease.execute("INCRBY", "users:{lock:a}n", 2) == 2
    assert await lease.execute("MGET", "users:{lock:a}1", "users:{lock:a}none") == [b"ann", None]
    clean.delete("lock:a")
    assert isinstance(await outcome(lease.execute("SET", "users:{lock:a}1", "late")), LeaseLost)
    assert clean.get("users:{lock:a}1") == b"ann"
    assert lease.lost.is_set()
    clean.delete("users:{lock:a}1", "users:{lock:a}n")


async def test_execute_raises_an_error_that_says_what_is_wrong_with_the_command(mode, clean):

    lease = await mode.interlock().lock("a").acquire()
    clean.lpush("users:list", 1)
    assert isinstance(await outcome(lease.execute("GET", "users:list")), ConfigError)
    assert isinstance(await outcome(lease.execute("NOSUCH", "x", keys=[])), LockError)
    assert isinstance(await outcome(lease.execute("GET", "x", keys=["y"])), ConfigError)
    lease.ensure()
    await lease.release()
    clean.delete("users:list")


# Foreigners


@rule(9)
async def test_a_foreign_set_nx_px_excludes_the_lock_and_is_excluded_by_it(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    assert not clean.set("lock:a", "foreign", nx=True, px=1000)
    await lease.release()
    assert clean.set("lock:a", "foreign", nx=True, px=700)
    assert await locks.lock("a").try_acquire() is None
    waiting = asyncio.ensure_future(locks.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    assert clean.get("lock:a") == b"foreign"
    mine = await waiting  # nobody tells us that it expired
    assert await mine.release()


@rule(9)
async def test_a_waiter_gets_the_lock_when_a_foreign_holder_deletes_its_key(mode, clean):
    locks = mode.interlock()
    clean.set("lock:a", "foreign", nx=True, px=60_000)
    waiting = asyncio.ensure_future(locks.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    clean.delete("lock:a")
    mine = await asyncio.wait_for(waiting, 5)
    await mine.release()


@rule(9)
async def test_a_foreign_holder_without_a_ttl_is_reported_at_once_and_left_alone(mode, clean):
    locks = mode.interlock()
    clean.set("lock:a", "somebody")
    for attempt in (locks.lock("a").acquire(), locks.lock("a").try_acquire()):
        error = await outcome(attempt)
        assert isinstance(error, ConfigError)
        assert "'a' is held without an expiry" in str(error)
        assert "somebody" in str(error)
    assert clean.get("lock:a") == b"somebody"
    assert isinstance(await outcome(locks.lock("a").revoke("dead")), ConfigError)
    assert await locks.lock("a").revoke("its host is gone", force=True)
    assert not clean.exists("lock:a")


@rule(9)
async def test_a_foreign_holder_that_loses_its_ttl_is_reported_to_waiters(mode, clean):
    locks = mode.interlock()
    clean.set("lock:a", "somebody", px=60_000)
    waiting = asyncio.ensure_future(outcome(locks.lock("a").acquire()))
    await until(lambda: queued(locks, 1))
    clean.persist("lock:a")
    assert isinstance(await asyncio.wait_for(waiting, 5), ConfigError)
    clean.delete("lock:a")
    await until(lambda: queued(locks, 0))


# Inspect and revoke


async def test_inspect_shows_holder_fence_remaining_time_and_waiters_in_order(mode):
    locks = mode.interlock()
    free = await locks.lock("a").inspect()
    assert not free.held
    assert (free.holder, free.remaining, free.waiters, free.waiting) == (None, None, (), 0)
    lease = await locks.lock("a").acquire()
    first = asyncio.ensure_future(mode.interlock(label="first").lock("a").acquire())
    await until(lambda: queued(locks, 1))
    second = asyncio.ensure_future(mode.interlock(label="second").lock("a").acquire())
    await until(lambda: queued(locks, 2))
    state = await locks.lock("a").inspect()
    assert state.held
    assert state.holder == lease.token
    assert state.fence == lease.fence
    assert 29 < state.remaining <= 30
    assert [waiter.split("@")[0] for waiter in state.waiters] == ["first", "second"]
    await lease.release()
    await (await first).release()
    await (await second).release()


async def test_a_revoked_holder_loses_its_lease_and_its_release_hands_the_lock_over(mode, clean):
    told = []
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a", ttl=3, on_lost=told.append).acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    assert await others.lock("a").revoke("disk full")
    state = await others.lock("a").inspect()
    assert state.holder == lease.token
    assert "disk full" in state.revoked
    await until(lease.lost.is_set, within=12)
    await until(lambda: told)
    with pytest.raises(LeaseLost, match="revoked"):
        lease.ensure()
    assert not waiting.done()
    assert not await lease.release()
    mine = await waiting
    assert mine.fence > lease.fence
    await mine.release()


async def test_a_revocation_reaches_a_subscribed_holder_by_push(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: is_subscribed(mode.session(locks)))
    started = machine_time()
    assert await others.lock("a").revoke("disk full")
    await until(lease.lost.is_set)
    assert machine_time() - started < 5  # its renewal would come after 10 s
    with pytest.raises(LeaseLost, match="disk full"):
        lease.ensure()
    await lease.release()
    await until(lambda: not clean.exists("lock:a"))


@of_the_server
async def test_a_revoked_lease_is_not_renewed_and_runs_out(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a", ttl=0.9).acquire()
    assert await locks.lock("a").revoke("test")
    await until(lease.lost.is_set)
    await until(lambda: not clean.exists("lock:a"), within=5)


async def test_revoke_by_force_hands_over_at_once(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    waiting = asyncio.ensure_future(others.lock("a").acquire())
    await until(lambda: queued(locks, 1))
    assert await others.lock("a").revoke("stuck", force=True)
    mine = await waiting
    assert not await lease.release()
    assert await mine.release()


async def test_revoke_of_a_free_lock_is_false_and_revoke_needs_a_reason(mode):
    locks = mode.interlock()
    assert not await locks.lock("a").revoke("why not")
    assert isinstance(await outcome(locks.lock("a").revoke("  ")), ConfigError)


# Endings


async def test_closing_an_interlock_releases_its_leases_and_ends_its_waiters(mode, clean):
    locks, others = mode.interlock(), mode.interlock()
    await_me = [await locks.lock(f"a{i}").acquire() for i in range(3)]
    waiting = asyncio.ensure_future(outcome(others.lock("a0").acquire()))
    await until(lambda: queued(locks, 1, "a0"))
    await others.close()
    error = await waiting
    assert isinstance(error, ConfigError)
    assert "closed" in str(error)
    assert await queued(locks, 0, "a0")
    await locks.close()
    assert not [key for key in list(clean.scan_iter()) if b"{" not in key]
    assert all(lease.state is LeaseState.RELEASED for lease in await_me)


async def test_a_closed_interlock_raises_config_error(mode):
    locks = mode.interlock()
    lock = locks.lock("a")
    await locks.close()
    await locks.close()
    assert isinstance(await outcome(lock.acquire()), ConfigError)
    with pytest.raises(ConfigError, match="closed"):
        locks.lock("b")


# Under load


async def test_fifty_buyers_sell_ten_tickets_exactly_once(mode, clean):
    clean.set("users:stock", 10)
    sold = []

    async def buy(number: int) -> None:
        async with await locks[number].lock("stock").acquire() as lease:
            left = int(clean.get("users:stock"))
            await asyncio.sleep(0.001)
            if left:
                lease.ensure()
                clean.set("users:stock", left - 1)
                sold.append(number)

    # Each client has two connections, and one over TLS takes 30 ms of a processor.
    clients = 50 if mode.way is WAYS["unix"] else 12
    locks = [mode.interlock() for _ in range(clients)]
    for each in locks:  # connected one after another
        await each.lock("stock").inspect()
    await asyncio.gather(*(buy(number) for number in range(clients)))
    assert len(sold) == 10
    assert int(clean.get("users:stock")) == 0
    clean.delete("users:stock")


async def test_many_tasks_or_threads_of_one_client_exclude_each_other(mode):
    locks = mode.interlock()
    counter = 0

    async def count() -> None:
        nonlocal counter
        for _ in range(20):
            async with await locks.lock("a").acquire():
                seen = counter
                await asyncio.sleep(0)
                counter = seen + 1

    await asyncio.gather(*(count() for _ in range(20)))
    assert counter == 400


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
async def test_extend_does_not_lengthen_a_lease_beyond_max_hold(mode, clean):
    lease = await mode.interlock().lock("a", max_hold=1).acquire()
    await lease.extend(30)
    assert clean.pttl("lock:a") < 1500
    await until(lambda: not clean.exists("lock:a"))
    await until(lambda: lease.state is LeaseState.LOST)
    assert not await lease.release()


@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
async def test_the_repr_of_a_lease_says_what_its_seconds_are(mode):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    assert " held, ends in 29." in repr(real(lease))
    assert repr(real(lease)).endswith(" s unless renewed>")
    await lease.release()
    assert repr(real(lease)).endswith(" released>")
    lease = await locks.lock("a", renew=False).acquire()
    assert repr(real(lease)).endswith(" s>")
    await lease.release()
    lease = await locks.multi(locks.lock("a"), locks.lock("b")).acquire()
    assert "held, ends in" in repr(real(lease))
    await lease.release()


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.not_on_a_quorum
@pytest.mark.runs_on("valkey-9.1", full="each server in both modes")
async def test_execute_stores_what_redis_py_stores(mode, clean):
    lease = await mode.interlock().lock("a").acquire()
    for given, stored in ((1, b"1"), (1.5, b"1.5"), (b"\xff", b"\xff"), (bytearray(b"y"), b"y"), (Number.ONE, b"1")):
        await lease.execute("SET", "x", given, keys=["x"])
        assert clean.get("x") == stored
    await lease.execute(b"DEL", "x", keys=["x"])
    await lease.release()
