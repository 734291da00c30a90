"""A quorum of independent servers, which are killed, stopped or cut off.

Not here: members that may have forgotten leases (faults/test_who_counts.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from harness.clock import machine_time
from harness.modes import SLACK, outcome, queued, real, until
from harness.proxy import Proxy
from harness.topology import Independents, empty
from harness.topology.group import ask
from interlock import AcquireTimeout, ConfigError, LeaseLost, LeaseState, Ran, Skipped, Unavailable
from interlock._client import waiting as _waiters
from interlock._client.lease_ends import LeaseEnds
from interlock._protocol.run_to_end import run
from interlock._protocol.server import Disconnected, TokenSpent
from interlock._protocol.timing import RETRY_FOR
from interlock._quarantine.voter import voter_key
from interlock._servers.quorum_votes import Request
from interlock.primitives.messages import NO_BOUND, AcquireCall, Granted, Queued

rule = pytest.mark.rule
VOTER = voter_key("lock:")
pytestmark = pytest.mark.runs_on("its own servers", starts="quorums of one to five servers of valkey-9.1")


@pytest.fixture(scope="module")
def servers():
    """Five servers that know nothing of each other; most tests use three."""
    with Independents(number=5) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(servers):
    """All servers run and are empty before each test; no key without a TTL is left after it."""
    empty(*servers.nodes)
    yield
    for node in servers.nodes:
        if not node.running:
            node.restart()
        node.resume()
        eternal = [key for key in ask(node, "KEYS", "*") if ask(node, "TTL", key) == -1]
        assert not eternal, f"keys without a TTL: {eternal}"


def nodes(servers, number=3):
    return servers.nodes[:number]


def quorum(mode, servers, number=3, **options):
    """A client."""
    return mode.interlock([node.url for node in nodes(servers, number)], **options)


def held(servers, number=3, name="a") -> list[str | None]:
    """The token that holds the lock at each server, or None."""
    return [ask(node, "GET", f"lock:{name}") for node in nodes(servers, number) if node.running]


def nothing_left(servers, number=3) -> bool:
    """Whether no server has a holder, a queue or a waiter left."""
    return not any(
        key
        for node in nodes(servers, number)
        for key in ask(node, "KEYS", "*")
        if not any(word in key for word in ("record", "gone", "voter"))
    )


@rule(7)
@pytest.mark.parametrize("number", [1, 3, 5])
async def test_an_acquire_and_a_release_leave_nothing_on_quorums_of_one_three_and_five(mode, servers, number):
    lock = quorum(mode, servers, number).lock("a")
    fences = []
    for _ in range(3):
        async with await lock.acquire() as lease:
            fences.append(lease.fence)
            assert held(servers, number).count(lease.token) > number // 2
            assert (await lock.inspect()).holder == lease.token
            assert await lock.try_acquire() is None
            assert lease.remaining() < 30 * 0.99
            assert lease.assurance.servers == number // 2 + 1
    assert fences == sorted(set(fences))
    await until(lambda: nothing_left(servers, number))
    assert not (await lock.inspect()).held


@rule(1)
@rule(7)
@pytest.mark.parametrize("number", [3, 5])
async def test_ten_clients_exclude_each_other_and_their_fences_grow(mode, servers, number):
    inside, fences = 0, []

    async def client():
        nonlocal inside
        lock = quorum(mode, servers, number).lock("a", timeout=30)
        for _ in range(3):
            async with await lock.acquire() as lease:
                inside += 1
                assert inside == 1
                fences.append(lease.fence)
                await asyncio.sleep(0.001)
                assert inside == 1
                inside -= 1

    await asyncio.gather(*(client() for _ in range(10)))
    assert len(fences) == 30
    assert fences == sorted(set(fences))
    await until(lambda: nothing_left(servers, number))


@rule(1)
async def test_of_five_clients_that_try_at_the_same_time_one_gets_the_lock(mode, servers):
    """Each client has a vote for a moment: one goes on, so that the job of that minute runs."""
    clients = [quorum(mode, servers, 5).lock("a") for _ in range(5)]
    for client in clients:
        await client.inspect()
    for _ in range(10):
        leases = [lease for lease in await asyncio.gather(*(client.try_acquire() for client in clients)) if lease]
        assert len(leases) == 1
        await leases[0].release()
        await until(lambda: nothing_left(servers, 5))


@rule(6)
@pytest.mark.parametrize("harm", ["kill", "pause"])
async def test_one_server_of_three_may_be_away(mode, servers, harm):
    locks = quorum(mode, servers)
    async with await locks.lock("a").acquire() as first:
        pass
    getattr(servers.nodes[0], harm)()
    for _ in range(3):
        async with await locks.lock("a").acquire() as lease:
            assert lease.fence > first.fence
            assert await locks.lock("a").try_acquire() is None
    fresh = quorum(mode, servers)
    async with await fresh.lock("a").acquire() as later:
        assert later.fence > lease.fence
    if harm == "pause":
        servers.nodes[0].resume()
        await until(lambda: nothing_left(servers))
    else:
        servers.nodes[0].restart()
    async with await locks.lock("a").acquire() as last:
        assert last.fence > later.fence
        node = real(locks)._session.server.nodes[0]
        await until(lambda: node.is_up)


@rule(8)
async def test_two_dead_servers_of_three_raise_unavailable_in_time(mode, servers):
    locks = quorum(mode, servers, quarantine=False)  # one comes back empty
    async with await locks.lock("a").acquire():
        pass
    servers.nodes[0].kill()
    servers.nodes[2].kill()
    started = machine_time()
    with pytest.raises(Unavailable, match="only 1 of 3 servers of the quorum answer"):
        await locks.lock("a").acquire()
    assert machine_time() - started < RETRY_FOR + 2 * SLACK
    with pytest.raises(Unavailable, match="only 1 of 3"):
        await locks.lock("a").acquire(timeout=0.5)
    with pytest.raises(Unavailable, match="only 1 of 3"):
        await quorum(mode, servers).lock("a").inspect()
    servers.nodes[0].restart()
    async with await locks.lock("a").acquire(timeout=10):
        pass


@rule(3)
async def test_a_split_vote_grants_nothing_and_never_hangs(mode, servers):
    """Four servers, two and two: neither half ends by itself."""
    ours = quorum(mode, servers, 4)
    keep = [("zz/1/t/x", 0), ("zz/1/t/x", 1), ("zz/1/t/y", 2), ("zz/1/t/y", 3)]
    for token, i in keep:
        ask(servers.nodes[i], "SET", "lock:a", token, "PX", 1500)
    assert await ours.lock("a").try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await ours.lock("a").acquire(timeout=0.3)
    async with await ours.lock("a").acquire(timeout=30):
        pass
    assert not (await ours.lock("a").inspect()).held


@rule(3)
async def test_a_client_with_one_vote_goes_on_when_the_votes_of_a_dead_client_have_run_out(mode, servers):
    ask(servers.nodes[0], "SET", "lock:a", "aa/1/t/x", "PX", 1000)  # it would go first
    ask(servers.nodes[1], "SET", "lock:a", "zz/1/t/x", "PX", 1000)
    async with await quorum(mode, servers).lock("a").acquire(timeout=10) as lease:
        assert held(servers).count(lease.token) >= 2


@pytest.mark.asyncio_only
@rule(8)
async def test_a_cancelled_acquire_leaves_nothing_at_any_server(mode, servers):
    locks, others = quorum(mode, servers), quorum(mode, servers)
    async with await locks.lock("a").acquire():
        waiting = asyncio.create_task(others.lock("a").acquire())
        await until(lambda: queued(locks, 1))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: queued(locks, 0))
    for delay in (0, 1, 2, 3, 4, 6):
        trying = asyncio.create_task(locks.lock("b").acquire())
        for _ in range(delay):
            await asyncio.sleep(0)
        trying.cancel()
        got = await asyncio.gather(trying, return_exceptions=True)
        if not isinstance(got[0], BaseException):
            await got[0].release()
    await until(lambda: nothing_left(servers))


@rule(8)
async def test_a_lost_reply_of_one_server_is_no_harm_and_of_two_leaves_no_lease(mode, servers):
    """After the lost replies of two servers nothing is left once the servers answer again."""
    with Proxy(servers.nodes[0].socket) as one, Proxy(servers.nodes[1].socket) as two:
        locks = mode.interlock([one.url, two.url, servers.nodes[2].url])
        async with await locks.lock("a").acquire():
            pass
        one.drop_replies = True
        async with await locks.lock("a").acquire() as lease:
            assert held(servers)[1:] == [lease.token] * 2
        two.drop_replies = True
        error = await outcome(locks.lock("a").acquire(timeout=1))
        assert isinstance(error, Unavailable)
        one.drop_replies = two.drop_replies = False
        one.cut()
        two.cut()
        await until(lambda: nothing_left(servers))
        async with await locks.lock("a").acquire(timeout=10) as later:
            assert later.fence > lease.fence


@rule(2)
async def test_votes_that_arrive_too_late_grant_nothing(mode, servers):
    """A vote may take a tenth of the ttl: the client that gets the lock holds it for most of that time."""
    with Proxy(servers.nodes[0].socket) as one, Proxy(servers.nodes[1].socket) as two:
        locks = mode.interlock([one.url, two.url, servers.nodes[2].url])
        async with await locks.lock("a").acquire():
            pass
        one.delay = two.delay = 0.15
        with pytest.raises(Unavailable):
            await locks.lock("a", ttl=0.3).acquire(timeout=1)
        one.delay = two.delay = 0.0
        await until(lambda: nothing_left(servers))


@rule(6)
async def test_renewals_go_on_with_a_minority_away(mode, servers):
    async with await quorum(mode, servers).lock("a", ttl=4).acquire() as lease:
        servers.nodes[1].kill()
        for _ in range(3):
            left = lease._grant.hold.deadline
            await until(lambda left=left: lease._grant.hold.deadline > left)
        assert lease.state == LeaseState.HELD


@rule(6)
@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_the_loss_of_the_majority_is_reported_as_a_loss_in_time(mode, servers, lost):
    """Of two servers so many have lost the key, and the others are away. The third one renews all the time."""
    lease = await quorum(mode, servers).lock("a", ttl=4).acquire()
    await until(lambda: held(servers) == [lease.token] * 3)
    for node in servers.nodes[lost:2]:
        node.pause()
    for node in servers.nodes[:lost]:
        ask(node, "DEL", "lock:a")
    if lost < 2:  # no majority has lost it
        await until(lambda: lease.state == LeaseState.JEOPARDY)
    deadline = lease._grant.hold.deadline
    await until(lease.lost.is_set)
    assert lease._core.runtime.now() < deadline + SLACK
    assert lease._grant.hold.deadline == deadline
    with pytest.raises(LeaseLost):
        lease.ensure()
    for node in servers.nodes[lost:2]:
        node.resume()


@rule(6)
async def test_a_key_that_a_minority_lost_is_no_loss_and_extend_creates_no_key(mode, servers):
    locks = quorum(mode, servers, max_ttl=50)
    lease = await locks.lock("a", ttl=30, renew=False).acquire()
    await until(lambda: held(servers) == [lease.token] * 3)
    ask(servers.nodes[0], "DEL", "lock:a")
    await lease.extend(40)
    assert held(servers) == [None, lease.token, lease.token]
    ask(servers.nodes[1], "DEL", "lock:a")
    with pytest.raises(LeaseLost):
        await lease.extend(50)
    assert held(servers)[:2] == [None, None]
    assert not await lease.release()
    await until(lambda: nothing_left(servers))


@rule(3)
async def test_waiters_are_woken_by_push(mode, servers, monkeypatch):
    """No waiter polls in this test."""
    monkeypatch.setattr(_waiters, "_next_heartbeat", lambda: 30.0)
    monkeypatch.setattr(_waiters, "HEARTBEAT_INTERVAL", 30.0)
    first, second = quorum(mode, servers), quorum(mode, servers)
    lease = await first.lock("a").acquire()
    waiting = asyncio.create_task(second.lock("a").acquire(timeout=60))
    await until(lambda: queued(first, 1))
    ports = real(second)._session.server.nodes
    await until(lambda: all(node.server.subscription_of("lock:a")[0] == "1" for node in ports))
    started = machine_time()
    assert await lease.release()
    async with await waiting:
        assert machine_time() - started < 15


@rule(6)
async def test_a_release_after_the_deadline_is_not_ours_by_the_word_of_a_minority(mode, servers, monkeypatch):
    """Found by random histories: one server still had the lease, one was away, and another client had held the lock.

    The process had just stood still, so the worker had not seen that the lease had ended.
    """

    async def stand_still(_self): ...

    monkeypatch.setattr(LeaseEnds, "tick", stand_still)
    lease = await quorum(mode, servers).lock("a", ttl=0.5, renew=False).acquire()
    first, away, late = nodes(servers)
    ask(late, "PEXPIRE", "lock:a", 60_000)  # it received the grant late, or its clock is slow
    other = await quorum(mode, servers).lock("a", timeout=10).acquire()
    assert await other.release() is True
    assert ask(late, "GET", "lock:a") == lease.token
    away.kill()
    assert ask(first, "GET", "lock:a") is None
    assert await lease.release() is False


@rule(7)
async def test_fences_grow_whatever_majority_grants_and_though_servers_forget(mode, servers):
    locks, fences = quorum(mode, servers, quarantine=False), []

    async def pair():
        async with await locks.lock("a").acquire(timeout=10) as lease:
            fences.append(lease.fence)

    for i in range(6):
        node = servers.nodes[i % 3]
        await pair()
        node.kill()
        await pair()
        await pair()
        node.restart()  # empty
        await until(lambda i=i: real(locks)._session.server.nodes[i % 3].is_up)
    await pair()
    assert fences == sorted(set(fences))


@rule(3)
async def test_a_quorum_comes_back_though_the_search_for_it_could_not_start(mode, servers, monkeypatch):
    """The machine may have no thread left just then."""

    def spawn(work, name, on_end):
        if name == "interlock-quorum":
            raise RuntimeError("can't start new thread")
        spawned(work, name, on_end)

    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.socket)) for node in nodes(servers)]
        for proxy in proxies:
            proxy.refuse = True
        locks = mode.interlock([proxy.url for proxy in proxies], try_for=0.3)
        runtime = mode.session(locks).runtime
        spawned = runtime.spawn
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "spawn", spawn)
            assert isinstance(await outcome(locks.lock("a", ttl=1).try_acquire()), Unavailable)
        for proxy in proxies:
            proxy.refuse = False
        lease = await locks.lock("a", ttl=1).acquire(timeout=20)
        await lease.release()
        await locks.close()


# What there is, and what there is not


async def test_every_synchronizer_that_a_quorum_has_works(mode, servers):
    locks, others = quorum(mode, servers), quorum(mode, servers)
    rlock = locks.rlock("r")
    async with await rlock.acquire() as outer:
        assert await others.rlock("r").try_acquire() is None
        assert outer.fence > 0
    both = locks.multi(locks.lock("x"), locks.lock("y"))
    async with await both.acquire() as leases:
        assert await others.lock("y").try_acquire() is None
        assert await others.multi(others.lock("y"), others.lock("z")).try_acquire() is None
        assert leases["x"].fence
    async with await others.multi(others.lock("y"), others.lock("z")).acquire(timeout=5):
        pass
    election = locks.election("e")
    leadership = await election.campaign()
    leader = await others.election("e").leader()
    assert (leader.token, leader.term) == (leadership.token, leadership.term)
    assert await leadership.resign()
    assert await others.election("e").leader() is None
    work = (lambda _: 42) if mode.name == "threads" else _answer
    first = await locks.once("o", at_most=60, key="today").run(work)
    assert isinstance(first, Ran)
    second = await others.once("o", at_most=60, key="today").run(work)
    assert isinstance(second, Skipped)
    assert second.by == first.by
    assert (await others.once("o", at_most=60, key="today").inspect()).last.by == first.by
    assert await others.once("o", at_most=60, key="today").forget()
    assert isinstance(await others.once("o", at_most=60, key="today").run(work), Ran)


async def _answer(_):
    return 42


@rule(6)
async def test_a_revocation_by_a_majority_ends_the_lease(mode, servers):
    locks, others = quorum(mode, servers), quorum(mode, servers)
    lease = await locks.lock("a", ttl=2).acquire()
    assert await others.lock("a").revoke("enough")
    await until(lease.lost.is_set)
    assert not await lease.release()
    async with await others.lock("a").acquire(timeout=10):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda locks: locks.rwlock("a"),
        lambda locks: locks.semaphore("a", 2),
        lambda locks: locks.latch("a", 2),
        lambda locks: locks.barrier("a", 2),
    ],
    ids=["rwlock", "semaphore", "latch", "barrier"],
)
async def test_a_synchronizer_that_a_quorum_lacks_is_refused_before_anything_is_sent(mode, make):
    locks = mode.interlock(["unix:///nowhere/1", "unix:///nowhere/2", "unix:///nowhere/3"])
    with pytest.raises(ConfigError, match="a quorum has no (rwlock|semaphore|latch|barrier)"):
        make(locks)


async def test_execute_is_refused_on_a_quorum(mode, servers):
    async with await quorum(mode, servers).lock("a").acquire() as lease:
        with pytest.raises(ConfigError, match="quorum"):
            await lease.execute("SET", "users:x", "1")
    assert ask(servers.nodes[0], "GET", "users:x") is None


async def test_a_server_that_is_listed_twice_has_one_vote(mode, servers):
    one, two = servers.nodes[:2]
    locks = mode.interlock([one.url, two.url, one.tcp_url])
    with pytest.raises(ConfigError, match="the same server") as caught:
        await locks.lock("a").acquire()
    assert one.tcp_url in str(caught.value)
    assert str(one.socket) in str(caught.value)
    with pytest.raises(ConfigError, match="twice"):
        mode.interlock([one.url, two.url, one.url])


async def test_the_log_names_a_server_that_does_not_vote_and_its_return(mode, servers, caplog):
    locks, node = quorum(mode, servers), servers.nodes[0]
    await (await locks.lock("a").acquire()).release()
    node.kill()
    await (await locks.lock("a").acquire()).release()
    await until(lambda: "does not vote" in caplog.text)
    assert "2 of the quorum's 3 servers answer; 2 are needed" in caplog.text
    node.restart()
    await until(lambda: "answers again" in caplog.text)


async def test_a_bad_list_of_servers_is_refused(mode, caplog):
    for wrong in (
        [], [None], ["redis+cluster://me:secret@a"], ["redis://localhost", ["redis://other"]], ["http://:secret@x"],
        ["redis+sentinel://:secret@a/0?service=m"],
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            mode.interlock(wrong)
        assert "secret" not in str(caught.value)
    made = type(real(mode.interlock(["unix:///nowhere"])))
    for wrong in ("redis://localhost", None, 5):
        with pytest.raises(ConfigError, match="list"):
            made.quorum(wrong)
    with caplog.at_level(logging.WARNING, "interlock"):
        mode.interlock(["unix:///nowhere/1", "unix:///nowhere/2"])
    assert "a quorum of 2" in caplog.text


@rule(1)
@rule(8)
async def test_an_attempt_whose_release_is_unconfirmed_goes_on_under_another_token(mode, servers):
    """The release may run after the next vote for the same token; the exhaustive search has the story."""
    locks = quorum(mode, servers, 3)
    await (await locks.lock("warm").acquire()).release()
    server, tokens = mode.session(locks).server, []
    ask = server._acquire

    async def split_at_first(request, until):
        tokens.append(request.call.token)
        reply = await ask(request, until)  # the servers keep these votes
        if len(tokens) == 1:
            raise TokenSpent
        return reply

    server._acquire = split_at_first
    lease = await locks.lock("a", ttl=3.6).acquire()
    assert lease.token == tokens[-1] != tokens[0]
    before = lease._grant.hold.deadline
    await until(lambda: lease._grant.hold.deadline > before)
    assert await lease.release()
    await until(lambda: nothing_left(servers, 3))


@rule(1)
@rule(4)
async def test_a_split_vote_whose_release_gets_no_reply_ends_the_token(mode, servers):
    """Otherwise two waiters could keep each other from a majority for ever: one vote of each would never count."""
    locks = quorum(mode, servers, 3)
    await (await locks.lock("warm").acquire()).release()
    server = mode.session(locks).server
    lock = locks.lock("a")
    call = AcquireCall("who/knows", "2000", "2000", "0", "", NO_BOUND, ())
    request = Request.parse((lock._primitive.script, lock._primitive.keys, call.encode()), VOTER)
    said = {node: [Granted(1)] for node in server.nodes}

    async def silence(_sent, *, late=False):
        return [Disconnected("no answer in time", sent=True)]

    server.nodes[0].server.read_batch = silence
    yielding = server._yield_split_vote(request, Queued(b"another", 50, is_head=False), said, server.now() + 5)
    with pytest.raises(TokenSpent):
        await (yielding if mode.name == "asyncio" else mode.in_thread(run, yielding))


async def test_a_pending_release_is_kept_for_as_long_as_the_lease_may_last(mode, servers):
    locks = quorum(mode, servers, max_ttl=900)
    lease = await locks.lock("a", ttl=200).acquire()
    server = mode.session(locks).server
    resource = lease._grant.resource
    owed = [Request.parse((resource.script, resource.keys, ("release", lease.token, "0")), VOTER)]

    def least() -> float:
        now, left = server.runtime.now(), []
        for node in server.nodes:
            node.record_undelivered(owed, now)
            _, end = node.pending_releases.pop(lease.token)
            left.append(end - now)
        return round(sorted(left)[1], 6)  # of a majority: the others may not have been asked

    assert least() >= 200
    await lease.extend(700)
    assert least() >= 700
    assert await lease.release()


@rule(6)
async def test_no_messages_have_no_replies_and_leave_nothing_to_read(mode, servers):
    """Whoever looks for the places of holders has nothing to ask if the registry is empty, as after FLUSHALL."""
    locks = quorum(mode, servers)
    await (await locks.lock("a").acquire()).release()
    session = mode.session(locks)
    assert await session.server.call_many([], session.server.now()) == []
    assert all(requests for node in session.server.nodes for _, requests in list(node.stragglers))
    await (await locks.lock("a").acquire()).release()
