"""D10: a server dies, and its address leads to a spare: an empty server that has run beside it for long.

As behind a virtual IP, a proxy with a backup, or a DNS name. The spare's process is older than the lost leases.

Not here: a spare of a server of a quorum, which judges itself (test_who_counts.py).
"""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from faults.test_quarantine import KINDS, LONGER, LONGEST, SLACK, crash, refused, remembering
from harness.clock import machine_time
from harness.matrix import required, uptime
from harness.modes import until, wait_until
from harness.proxy import Proxy
from harness.servers import Missing, Node, faketime
from harness.topology.group import ask
from interlock._connect.target import address_of
from interlock._protocol import timing
from interlock._quarantine.identity import NO_REPLID, Facts
from interlock._quarantine.server_history import ServerHistory

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1")
ROUNDING = 2.0  # seconds by which the client may take a process for older than it is


@pytest.fixture(scope="module")
def other_server():
    """A server that has run for longer than any lease lasts, before a test starts others."""
    with Node() as made:
        yield made


@pytest.fixture
def spare(other_server):
    """An empty server that has run for long."""
    wait_until(lambda: uptime(other_server) > LONGEST + ROUNDING)
    ask(other_server, "FLUSHALL")
    return other_server


class Name:
    """An address that leads to one server, and later to another one."""

    def __init__(self, node) -> None:
        self.node = node
        self.proxy = Proxy(lambda: self.node.socket)

    def __enter__(self):
        self.proxy.__enter__()
        return self

    def __exit__(self, *args) -> None:
        self.proxy.__exit__(*args)

    @property
    def url(self) -> str:
        return self.proxy.url

    def fall_over(self, spare) -> float:
        """Kill the server, and lead to the spare; returns when the server was dead: no lease is younger."""
        self.node.kill()
        died = timing.now()
        self.node = spare
        return died


def is_heard_no_more(locks) -> bool:
    """Whether the client last read something so long ago that it takes no later process for an older one."""
    return timing.now() > locks._session.server.history.latest.answered_at + ROUNDING


def end_of(lease) -> float:
    """Until when its holder may rely on a new lease, by the clock of the machine."""
    return timing.now() + lease.remaining()


@rule(10)
@pytest.mark.parametrize("kind", ["lock", "semaphore", "write", "multi"])
async def test_a_spare_grants_nothing_that_the_server_before_it_may_have_granted(mode, node, spare, kind):
    with Name(node) as name:
        holder, other = await remembering(mode, name.url), await remembering(mode, name.url)
        lease = await mode.keep(KINDS[kind](holder, "a").acquire())
        died = name.fall_over(spare)
        assert "quarantine" in await refused(KINDS[kind](other, "a"))
        fresh = mode.interlock(name.url, max_ttl=LONGEST)
        if kind != "multi":  # which has left its evidence at the first of its names only
            assert "quarantine" in await refused(KINDS[kind](fresh, "a")), "it reads what the other one wrote"
        second = await mode.keep(KINDS[kind](other, "a").acquire(timeout=30))
        assert timing.now() - died >= LONGEST - SLACK
        assert kind == "multi" or second.fence > lease.fence
        await second.release()
        for each in (other, holder, fresh):
            await (await KINDS[kind](each, "a").acquire(timeout=0)).release()


@rule(6, 10)
async def test_a_holder_relies_on_its_lease_for_as_long_as_nobody_gets_it_from_a_spare(mode, node, spare):
    """The holder hears of no loss: its own name of the dead server leads nowhere."""
    with Name(node) as name:
        holder, other = await remembering(mode, node.url), await remembering(mode, name.url)
        lease = await mode.keep(holder.lock("a", ttl=LONGEST, renew=False).acquire())
        ends = end_of(lease) - SLACK
        name.fall_over(spare)
        getting = asyncio.ensure_future(other.lock("a", ttl=LONGEST).acquire(timeout=30))
        while timing.now() < ends:
            lease.ensure()
            assert not getting.done(), "two holders"
            await asyncio.sleep(0.01)
        await (await getting).release()


@rule(10)
async def test_clients_that_meet_a_spare_later_do_not_lengthen_its_quarantine(mode, node, spare):
    with Name(node) as name:
        first, second = await remembering(mode, name.url), await remembering(mode, name.url)
        name.fall_over(spare)
        await refused(first.lock("a", ttl=LONGEST))
        met = machine_time()
        await until(lambda: machine_time() - met > LONGEST / 2)
        await refused(second.lock("a", ttl=LONGEST))
        await (await second.lock("a", ttl=LONGEST).acquire(timeout=30)).release()
        assert machine_time() - met < LONGEST + 1


@rule(10)
async def test_the_first_replica_of_a_spare_ends_its_quarantine_for_nobody(mode, node, spare):
    """The spare has another identity then, and a client that meets it for the first time knows its start only."""
    with Name(node) as name, Node() as replica:
        holder, other = await remembering(mode, name.url), await remembering(mode, name.url)
        ends = end_of(await mode.keep(holder.lock("a", ttl=LONGEST, renew=False).acquire())) - SLACK
        name.fall_over(spare)
        await refused(other.lock("a", ttl=LONGEST))
        ask(replica, "REPLICAOF", "127.0.0.1", str(spare.port))
        await until(lambda: "connected_slaves:1" in ask(spare, "INFO", "replication"))
        fresh = mode.interlock(name.url, max_ttl=LONGEST)
        await mode.keep(fresh.lock("a", ttl=LONGEST).acquire(timeout=30))
        assert timing.now() >= ends


@rule(10)
async def test_who_took_the_spare_for_a_restarted_server_does_not_shorten_its_quarantine(mode, node, spare):
    """That client last heard of the old server before the spare was started, so it counts from the spare's start."""
    with Name(node) as name, Node() as young:
        idle = await remembering(mode, name.url, max_ttl=LONGER)
        await until(lambda: is_heard_no_more(idle))
        young.restart()
        active = await remembering(mode, name.url, max_ttl=LONGER)
        await until(lambda: uptime(young) > ROUNDING)
        ends = end_of(await mode.keep(active.lock("a", ttl=LONGER, renew=False).acquire()))
        name.fall_over(young)
        await refused(idle.lock("a", ttl=LONGER))  # it writes the evidence first
        await refused(active.lock("a", ttl=LONGER))
        await mode.keep(idle.lock("a", ttl=LONGER).acquire(timeout=30))
        assert timing.now() >= ends


@rule(5, 10)
async def test_a_restarted_server_whose_clock_was_set_forward_seems_older_and_grants_nothing(mode, server_pool):
    """The server reports its age by its own clock: it seems to have run for long before this client last met it."""
    try:
        faketime()
    except Missing as missing:
        required(f"no libfaketime here: {missing}")
    with Node(clock=True) as node:
        locks = await remembering(mode, node.url)
        ends = end_of(await mode.keep(locks.lock("a", ttl=LONGEST, renew=False).acquire()))
        node.kill()
        node.restart()
        node.shift(3600)
        await until(lambda: uptime(node) > 60)
        await mode.keep(locks.lock("a", ttl=LONGEST).acquire(timeout=30))
        assert timing.now() >= ends


@rule(10)
async def test_a_client_that_was_idle_waits_for_no_server_that_restarted_long_ago(mode, node):
    locks = await remembering(mode, node.url)
    await until(lambda: is_heard_no_more(locks))
    crash(node)
    await until(lambda: uptime(node) > LONGEST + ROUNDING)
    await (await locks.lock("never used", ttl=LONGEST).acquire(timeout=0)).release()


@rule(10)
async def test_a_client_notes_when_it_asked_a_server_for_its_age(mode, proxy):
    """It may read the reply much later, if the process stands still meanwhile."""
    locks, before = mode.interlock(proxy.url), timing.now()
    proxy.delay = 0.3
    await locks.lock("a").inspect()
    stamp = mode.session(locks).server.history.latest
    assert before < stamp.facts.sent_at < stamp.met_at - proxy.delay


@rule(10)
async def test_a_client_heard_of_a_server_when_it_last_read_a_reply(mode, node):
    """Whoever connects again knows only that time, and the time is the same for all connections of a client."""
    locks = await remembering(mode, node.url)
    stamp = mode.session(locks).server.history.latest
    met, before = stamp.met_at, timing.now()
    assert met <= stamp.answered_at <= before
    await locks.lock("a").inspect()
    assert before <= stamp.answered_at <= timing.now()
    assert stamp.met_at == met


# The comparison


@pytest.fixture
def clock(monkeypatch):
    """The client's clock, which stands still: a list of the seconds."""
    clock = [1000.0]
    for module in ("stamp", "server_history"):
        monkeypatch.setattr(f"interlock._quarantine.{module}.now", lambda: clock[0])
    return clock


def an_address():
    return address_of("redis://127.0.0.1", for_asyncio=False)


def meet(memory, server, uptime, *, sent_at, replid2=NO_REPLID, replid=None):
    """The stamp of a connection whose handshake is sent at `sent_at`, and read now."""
    facts = Facts(server * 40, (replid or server) * 40, replid2, uptime, 5_000_000, replicas=0, sent_at=sent_at)
    return memory.identify(facts, an_address())


def past_of(stamp):
    """Since when the server is there by its own clock, s before now; and which server was there before."""
    since, _, _, previous, *_ = stamp.text[26:].split()
    return 5000 - int(since) / 1000, previous


@rule(10)
@pytest.mark.parametrize(
    ("answered", "sent", "met", "age", "is_spare"),
    # When the first server last answered; when the client asked the next one, when it read the reply; its uptime
    [
        (100, 200, 200, 98, False),  # started at 102
        (100, 200, 200, 99, False),  # at 101, or up to a second before
        (100, 200, 200, 100, True),
        (100, 200, 200, 101, True),
        (100, 200, 200, 100_000, True),
        (100, 200, 203, 98, False),  # at 102 to 105
        (100, 200, 203, 102, True),
        (100, 200, 203, 104, True),
        (199, 200, 200, 0, False),  # a restart of a second
        (199.5, 200, 200, 0, True),  # a faster one: as old as the connection, at most
        (250, 200, 300, 98, True),  # the first server answered later than the client asked the next one
    ],
)
def test_which_server_is_a_spare(clock, answered, sent, met, age, is_spare):
    clock[0] = 50.0
    memory = ServerHistory(60.0)
    first = meet(memory, "a", 5, sent_at=50.0)
    first.answered_at, clock[0] = answered, met
    since, previous = past_of(meet(memory, "b", age, sent_at=sent))
    assert previous == ("@@" if is_spare else "") + first.identity
    assert since == (0 if is_spare else max(0, age - 1))


@rule(10)
@pytest.mark.parametrize("order", [*permutations("abc")])
def test_a_server_is_a_spare_if_any_server_before_it_may_have_answered_later(clock, order):
    """Of three servers one after the other, replies may come late: the latest reply of any of them counts."""
    clock[0] = 0.0
    memory = ServerHistory(60.0)
    for server in order:
        meet(memory, server, 500, sent_at=clock[0])
        clock[0] += 100
    memory.stamps[f"{order[0] * 12}:{order[0] * 12}"].answered_at = 290.0
    clock[0] = 1000.0
    assert past_of(meet(memory, "x", 705, sent_at=1000.0)) == (704, f"{order[2] * 12}:{order[2] * 12}")
    memory.stamps[f"{order[0] * 12}:{order[0] * 12}"].answered_at = 296.0
    assert past_of(meet(memory, "y", 705, sent_at=1000.0))[0] == 0


@rule(10)
def test_a_process_is_no_spare_beside_itself(clock):
    """Its first replica changes its replid."""
    memory = ServerHistory(60.0)
    meet(memory, "a", 500, sent_at=1000.0)
    assert past_of(meet(memory, "a", 500, sent_at=1000.0, replid="b"))[1] == "-"


@rule(10)
def test_the_first_replica_of_a_spare_does_not_begin_its_quarantine_anew(clock):
    memory = ServerHistory(60.0)
    first = meet(memory, "a", 500, sent_at=1000.0)
    second = meet(memory, "b", 500, sent_at=1000.0)
    clock[0] += 20
    third = meet(memory, "b", 520, sent_at=1020.0, replid="r")
    assert past_of(second) == past_of(third) == (0, f"@@{first.identity}"), "the server's clock stands still here"
    later = memory.identify(third.facts._replace(replid="s" * 40, now_ms=5_040_000), an_address())
    assert past_of(later) == (0, f"@@{first.identity}")
    memory.identify(first.facts._replace(replid="s" * 40, now_ms=5_060_000), an_address())
    assert memory.latest.since_ms == 5_060_000, "it comes back after another server, and has lost what that one granted"


@rule(10)
def test_a_promoted_server_is_no_spare_since_a_proof_may_clear_it(clock):
    memory = ServerHistory(60.0)
    first = meet(memory, "a", 500, sent_at=1000.0)
    second = meet(memory, "b", 500, sent_at=1000.0, replid2="a" * 40)
    assert past_of(second) == (0, first.identity)
    second.mark_lossless(first.identity)
    assert past_of(second)[1] == "-"


@rule(10)
def test_no_proof_clears_a_spare(clock):
    memory = ServerHistory(60.0)
    first = meet(memory, "a", 500, sent_at=1000.0)
    second = meet(memory, "b", 500, sent_at=1000.0)
    second.mark_lossless(first.identity)
    assert past_of(second) == (0, f"@@{first.identity}")
    assert second.in_quarantine


@rule(10)
def test_a_server_after_a_spare_in_quarantine_has_not_forgotten_the_one_before(clock):
    memory = ServerHistory(60.0)
    first = meet(memory, "a", 500, sent_at=1000.0)
    second = meet(memory, "b", 500, sent_at=1000.0)
    clock[0] += 30
    third = meet(memory, "c", 10, sent_at=1030.0)  # a restart of the spare
    assert past_of(third) == (9, first.identity), "it counts from its own start, and says so"
    assert past_of(meet(memory, "d", 500, sent_at=1030.0)) == (0, f"@@{first.identity}")
    assert past_of(meet(memory, "b", 500, sent_at=1030.0)) == (0, f"@d{'d' * 11}:{'d' * 12}"), "it has returned"
    assert second.text[25] == third.text[25] == " ", "the plain cases of the scripts hold there"


@rule(10)
def test_a_server_that_returns_under_another_replid_has_lost_what_others_granted(clock):
    """A replica was attached to it while its address led to another one."""
    memory = ServerHistory(60.0)
    meet(memory, "a", 500, sent_at=1000.0)
    clock[0] += 10
    second = meet(memory, "b", 3, sent_at=1010.0)
    clock[0] += 10
    third = meet(memory, "a", 520, sent_at=1020.0, replid="r")
    assert past_of(third) == (0, f"@{second.identity}")
    assert not third.lossless_from
    assert third.text[25] == "*"


@rule(10)
def test_a_handshake_with_a_known_server_is_an_answer_of_it(clock):
    memory = ServerHistory(60.0)
    first = meet(memory, "a", 500, sent_at=1000.0)
    clock[0] += 300
    assert meet(memory, "a", 800, sent_at=clock[0]) is first
    assert first.answered_at == clock[0]
