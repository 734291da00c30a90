"""D10: a member of a quorum that may have forgotten leases counts for nothing until they have run out (ADR 60).

Members are real servers that restart, are emptied, or are given other data, or whose address leads elsewhere, while a
lease lives that a majority has granted. The client that asks for the same lock knew the members before, or is new, as
a new process is. Beside that: leases that outlive a restart of each member, one after the other.

Not here: votes, splits and fences (topologies/test_quorum.py), all orders of events (model/test_voters.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

import interlock
import interlock.aio
from faults.test_spares import Name, end_of
from harness.matrix import required
from harness.modes import outcome, real, until
from harness.proxy import Proxy
from harness.servers import Missing, Node, faketime
from harness.topology import Independents, empty, serve_long
from harness.topology.group import QUICK, ask, info
from harness.topology.independents import voter_of, write_voter
from interlock import AcquireTimeout, ConfigError, LeaseLost, LockError, Ran, Unavailable
from interlock._protocol import timing
from interlock._quarantine.voter import VoterRecord, voter_key

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="quorums of valkey-9.1, replicas, and a cluster")
MAX_TTL = 1.75  # seconds: of all clients, unless a test says otherwise; and the ttl of their leases
LONGER = 1.5 * MAX_TTL  # seconds: max_ttl of other clients
PATIENCE = 25.0  # seconds for which a caller waits in the end
VOTER = voter_key("lock:")


@pytest.fixture(scope="module")
def group():
    with Independents(number=3, config=QUICK) as made:
        yield made


@pytest.fixture
def members(group):
    """Three members of a quorum, which are empty and have served for long."""
    empty(*group.nodes)
    yield group.nodes
    for node in group.nodes:
        if not node.running:
            node.restart()
        ask(node, "REPLICAOF", "NO", "ONE")
        eternal = [key for key in ask(node, "KEYS", "*") if ask(node, "TTL", key) == -1]
        assert not eternal, f"keys without a TTL: {eternal}"


@pytest.fixture(scope="module")
def other_server():
    """A server that belongs to no quorum yet."""
    with Node(config=QUICK) as made:
        yield made


@pytest.fixture
def spare(other_server):
    """An empty server that has run beside the members."""
    ask(other_server, "REPLICAOF", "NO", "ONE")
    ask(other_server, "FLUSHALL")
    return other_server


def new(mode, members, **options):
    """A client that has met none of these members, as a new process has not."""
    return mode.interlock([each.url for each in members], **{"max_ttl": MAX_TTL, **options})


async def known(mode, members, **options):
    """A client that has open connections to all members."""
    locks = new(mode, members, **options)
    await (await locks.lock("hello", ttl=1).acquire(timeout=PATIENCE)).release()
    return locks


async def client(mode, members, who, **options):
    """A client that knew the members before the test harms them; or None, in whose place a `new` one asks."""
    return await known(mode, members, **options) if who == "known" else None


async def held_everywhere(mode, locks, members, name="a", *, ttl=MAX_TTL, renew=False):
    """A lease that each member has; and until when its holder may rely on it, if nobody renews it."""
    lease = await mode.keep(locks.lock(name, ttl=ttl, renew=renew).acquire(timeout=PATIENCE))
    ends = end_of(lease)
    await until(lambda: [holder_at(each, name) for each in members] == [lease.token] * len(members))
    return lease, ends


def holder_at(member, name="a") -> str | None:
    """The token that holds the lock at this member."""
    return ask(member, "GET", f"lock:{name}")


def record_at(member, name="a") -> list[str]:
    """The words of the lock's record at this member."""
    return ask(member, "GET", f"{{lock:{name}}}{{record}}").split()


def has_tombstone(member, token, name="a") -> bool:
    return ask(member, "ZSCORE", f"{{lock:{name}}}{{gone}}", token) is not None


def never_voted(*members) -> None:
    """Let these members be as if no message of the lock's holder had reached them."""
    for each in members:
        ask(each, "DEL", "lock:a", "{lock:a}{record}")


def crash(*members) -> None:
    """Kill these members, and start them again: empty."""
    for each in members:
        each.kill()
        (each.socket.parent / "dump.rdb").unlink(missing_ok=True)  # what it got as a replica
    for each in members:
        each.restart()


async def follow(member, source) -> None:
    """Let this member have all data of another server, as its replica."""
    ask(member, "REPLICAOF", "127.0.0.1", source.port)
    await until(lambda: info(member)["master_link_status"] == "up")


async def reseed(member, source) -> None:
    """Give the member the data of another server. All of its connections stay open."""
    await follow(member, source)
    ask(member, "REPLICAOF", "NO", "ONE")


async def nobody_gets_it_before(mode, locks, ends, lease, *, ttl=MAX_TTL) -> None:
    """Fail if this client gets the lock while the holder of this lease may rely on it."""
    later = await mode.keep(locks.lock("a", ttl=ttl).acquire(timeout=PATIENCE))
    assert timing.now() >= ends, "two holders"
    assert later.fence > lease.fence
    assert await later.release()


def abstains(member) -> bool:
    """Whether this member counts for nothing now."""
    record, (now, _) = voter_of(member), ask(member, "TIME")
    is_own = record is not None and record.replid == info(member)["master_replid"]
    return not is_own or int(now) * 1000 < record.since_ms + record.longest_ms


each_client = pytest.mark.parametrize("who", ["known", "new"])


# The attacks


class Holder(threading.Thread):
    """Another process that holds the lock and works without a pause: in asyncio without an `await`."""

    def __init__(self, mode_name, members) -> None:
        super().__init__(name="holder")
        self.urls = [each.url for each in members]
        self.is_asyncio = mode_name == "asyncio"
        self.holds = threading.Event()
        self.relied_at = 0.0  # when it last began a step of its work, by the clock of leases

    def run(self) -> None:
        if self.is_asyncio:
            asyncio.run(self._in_asyncio())
            return
        with interlock.Interlock.quorum(self.urls, max_ttl=MAX_TTL) as locks:
            self._work(locks.lock("a", ttl=MAX_TTL).acquire(timeout=PATIENCE))

    async def _in_asyncio(self) -> None:
        async with interlock.aio.Interlock.quorum(self.urls, max_ttl=MAX_TTL) as locks:
            self._work(await locks.lock("a", ttl=MAX_TTL).acquire(timeout=PATIENCE))

    def _work(self, lease) -> None:
        self.holds.set()
        with contextlib.suppress(LeaseLost):
            while True:
                began = timing.now()
                lease.ensure()
                self.relied_at = began
                time.sleep(0.002)


@rule(10)
@each_client
async def test_all_members_restart_empty_at_once_under_a_holder_that_lives(mode, members, who):
    """As by `docker compose restart`, a power cut. A new process can't tell such a quorum from a new one."""
    other = await client(mode, members, who)
    holder = Holder(mode.name, members)
    holder.start()
    await until(holder.holds.is_set)
    crash(*members)
    lease = await mode.keep((other or new(mode, members)).lock("a", ttl=MAX_TTL).acquire(timeout=PATIENCE))
    granted = timing.now()
    await until(lambda: not holder.is_alive())
    assert holder.relied_at <= granted, "two holders"
    assert await lease.release()


@rule(10)
@each_client
@pytest.mark.parametrize("source", ["another member", "its own replica, which lags"])
async def test_a_member_is_reseeded_under_open_connections(mode, members, spare, who, source):
    """The lease has two votes of three; the member that votes for nobody else forgets its vote. No connection ends."""
    one, _, third = members
    if source != "another member":
        await follow(spare, one)  # its first replica, so `one` has another replid
        serve_long(one)
    holder, other = await known(mode, members), await client(mode, members, who)
    lease, _ = await held_everywhere(mode, holder, members, ttl=1)  # so the replica has a record of this server
    assert await lease.release()
    if source != "another member":
        await until(lambda: info(one)["master_repl_offset"] == info(spare)["slave_repl_offset"])
        ask(spare, "REPLICAOF", "NO", "ONE")
    lease, ends = await held_everywhere(mode, holder, members)
    never_voted(third)
    await reseed(one, third if source == "another member" else spare)
    assert holder_at(one) is None
    await nobody_gets_it_before(mode, other or new(mode, members), ends, lease)


@rule(10)
@each_client
async def test_a_spare_takes_over_the_address_of_a_member(mode, members, spare, who):
    one, two, third = members
    with Name(one) as name:
        addresses = [name, two, third]
        holder, other = await known(mode, addresses), await client(mode, addresses, who)
        lease, ends = await held_everywhere(mode, holder, members)
        never_voted(third)
        name.fall_over(spare)
        await nobody_gets_it_before(mode, other or new(mode, addresses), ends, lease)


@rule(6, 10)
async def test_an_address_that_leads_to_another_member_renews_no_lease_twice(mode, members):
    one, two, third = members
    with Name(one) as a, Name(two) as b, Name(third) as c:
        holder = await known(mode, [a, b, c])
        lease, _ = await held_everywhere(mode, holder, members, renew=True)
        lead_to(b, one)
        c.proxy.refuse = True
        c.proxy.cut()
        later = await mode.keep(new(mode, members).lock("a", ttl=MAX_TTL).acquire(timeout=PATIENCE))
        with pytest.raises(LeaseLost):
            lease.ensure()
        assert await later.release()
        await holder.close()


@rule(1, 10)
async def test_an_address_that_leads_to_another_member_has_no_second_vote(mode, members):
    """The holder has two members, and the third one never heard of it. Its votes would count under two addresses."""
    one, two, third = members
    with Name(one) as a, Name(two) as b, Name(third) as c:
        holder, other = await known(mode, members), await known(mode, [a, b, c])
        await held_everywhere(mode, holder, members, renew=True)
        never_voted(one)
        lead_to(b, one)
        for timeout in (0, 1.0):
            assert isinstance(await outcome(other.lock("a", ttl=MAX_TTL).acquire(timeout=timeout)), LockError)
        await other.close()


def lead_to(name, member) -> None:
    """Let this address lead to another server from now on."""
    name.node = member
    name.proxy.cut()


@rule(5, 10)
@each_client
async def test_the_clock_is_set_forward_after_a_restart(mode, members, who):
    """By its own clock each of the two has run for an hour, and has forgotten the lease."""
    try:
        faketime()
    except Missing as missing:
        required(f"no libfaketime here: {missing}")
    with Node(clock=True) as one, Node(clock=True) as two:
        quorum = [one, two, members[2]]
        serve_long(one, two)
        holder, other = await known(mode, quorum), await client(mode, quorum, who)
        lease, ends = await held_everywhere(mode, holder, quorum)
        crash(one, two)
        for each in (one, two):
            each.shift(3600)
        await until(lambda: int(info(two, "server")["uptime_in_seconds"]) > 60)
        await nobody_gets_it_before(mode, other or new(mode, quorum), ends, lease)
        for each in mode.made:
            await each.close()


@rule(10)
async def test_members_that_were_promoted_long_ago_keep_no_job_from_its_nights(mode, members, spare):
    for each in members[:2]:
        await reseed(each, spare)
    serve_long(*members)
    for night in range(4):
        locks = new(mode, members)
        done = await locks.once("job", at_most=MAX_TTL, key=str(night)).run(work_of(mode))
        assert isinstance(done, Ran), done


def work_of(mode):
    return (lambda _: None) if mode.name == "threads" else _nothing


async def _nothing(_) -> None: ...


# What else a member may lose, and what it may find


@rule(10)
@each_client
@pytest.mark.parametrize(
    ("number", "command"),
    [(2, ("DEL", VOTER, "lock:a", "{lock:a}{record}")), (3, ("FLUSHALL",))],
    ids=["two have lost the record", "all are emptied"],
)
async def test_a_member_without_a_voter_record_does_not_vote(mode, members, who, number, command):
    holder, other = await known(mode, members), await client(mode, members, who)
    lease, ends = await held_everywhere(mode, holder, members)
    for each in members[:number]:
        ask(each, *command)
    await nobody_gets_it_before(mode, other or new(mode, members), ends, lease)


@rule(10)
async def test_what_one_emptied_member_may_have_granted_is_no_majority(mode, members):
    """The other two have served all the time, so nobody waits."""
    locks = await known(mode, members)
    ask(members[0], "FLUSHALL")
    for each in (locks, new(mode, members)):
        await (await each.lock("a").acquire(timeout=1)).release()


@rule(10)
async def test_restarted_members_wait_as_long_as_the_longest_max_ttl_of_their_clients(mode, members):
    """They restart with the data of before a lease. Only another client may grant itself leases that are so long."""
    holder = await known(mode, members, max_ttl=LONGER)
    for each in members:
        ask(each, "SAVE")
    lease, ends = await held_everywhere(mode, holder, members, ttl=LONGER)
    for each in members[:2]:
        each.kill()
        each.restart()
        assert voter_of(each).longest_ms == LONGER * 1000
    await nobody_gets_it_before(mode, new(mode, members), ends, lease)
    for each in members:
        (each.socket.parent / "dump.rdb").unlink(missing_ok=True)


@rule(10)
async def test_emptied_members_wait_as_long_as_each_client_says(mode, members):
    """A client with a longer max_ttl asks later: it may know of a holder of its own kind."""
    short, long = await known(mode, members), await known(mode, members, max_ttl=LONGER)
    began = timing.now()
    for each in members:
        ask(each, "FLUSHALL")
    assert await refused(short)
    assert await refused(long)
    await (await short.lock("a", ttl=1).acquire(timeout=PATIENCE)).release()
    assert timing.now() >= began + LONGER - 0.1  # of rounding
    await (await long.lock("a", ttl=1).acquire(timeout=0)).release()


@rule(6, 10)
async def test_members_that_restart_with_their_data_at_once_renew_no_lease(mode, members):
    """Each has the lease, and can't know that no other member has forgotten it. The holder learns of the loss."""
    holder = await known(mode, members)
    lease, _ = await held_everywhere(mode, holder, members, renew=True)
    for each in members:
        ask(each, "SAVE")
    for each in members[:2]:
        each.kill()
        each.restart()
    deadline = lease._grant.hold.deadline
    await until(lease.lost.is_set)
    assert lease._grant.hold.deadline == deadline
    for each in members:
        (each.socket.parent / "dump.rdb").unlink(missing_ok=True)


async def refused(locks, name="a") -> bool:
    """Whether the members abstain: the client is refused at once, and the error says so."""
    answers = []

    async def answered() -> bool:  # on a busy machine a vote may take too long
        answers.append(await outcome(locks.lock(name, ttl=MAX_TTL).acquire(timeout=0)))
        return not isinstance(answers[-1], Unavailable)

    await until(answered)
    if isinstance(error := answers[-1], AcquireTimeout):
        assert (error.quarantined, error.holder) == (True, None)
        assert "most servers of its quorum grant nothing for" in str(error)
        return True
    await error.release()
    return False


@rule(10)
async def test_a_first_replica_pauses_a_member_and_the_error_says_so(mode, members, spare):
    """A backup by `redis-cli --rdb` attaches as one, too. The server might have been given other data."""
    crash(*members)  # those that had a replica keep its backlog, and their replid
    serve_long(*members)
    with Node(config=QUICK) as another:
        locks = await known(mode, members)
        for replica, member in zip((spare, another), members, strict=False):
            await follow(replica, member)
        assert await refused(locks)
        assert (await locks.lock("a").inspect()).quarantined
        assert await refused(new(mode, members))
        await (await locks.lock("a").acquire(timeout=PATIENCE)).release()
        await (await new(mode, members).lock("a").acquire(timeout=1)).release()


@rule(5, 10)
async def test_a_record_that_is_ahead_of_the_clock_begins_now(mode, members):
    """As when the clock was set back: nobody waits for hours."""
    began = timing.now()
    serve_long(*members, seconds=-3600.0)
    locks = new(mode, members)
    await (await locks.lock("a", ttl=1).acquire(timeout=PATIENCE)).release()
    assert timing.now() >= began + MAX_TTL - 0.1
    for each in members:
        assert voter_of(each).since_ms <= int(ask(each, "TIME")[0]) * 1000 + 1000


@rule(10)
async def test_the_first_contact_starts_the_clock_of_a_new_member(mode, members):
    """Whatever the first client does there, and whether or not anybody asks for a lock."""
    for each in members:
        ask(each, "FLUSHALL")
    await new(mode, members).lock("a").inspect()
    for each in members:
        record = voter_of(each)
        assert record is not None
        assert (record.replid, record.longest_ms) == (info(each)["master_replid"], MAX_TTL * 1000)


@rule(10)
async def test_a_job_waits_for_members_that_abstain_and_skips_no_night(mode, members):
    """Each night its process is the first client since all members were restarted for a backup."""
    crash(*members)
    done = await new(mode, members).once("job", at_most=MAX_TTL + 1, key="tonight").run(work_of(mode))
    assert isinstance(done, Ran), done


@rule(10)
async def test_no_revocation_ends_an_abstention(mode, members):
    """The member doesn't know what it has forgotten, whatever the name. `interlock quorum new` is the way out."""
    locks = await known(mode, members)
    for each in members:
        ask(each, "FLUSHALL")
    assert await refused(locks)
    with pytest.raises(ConfigError, match="interlock quorum new"):
        await locks.lock("a").revoke("nothing is at work", force=True)
    assert await refused(locks)
    assert await refused(new(mode, members))


# Leases that outlive restarts


@rule(6, 10)
async def test_a_lock_and_an_election_outlive_a_rolling_restart(mode, members):
    """Each member restarts empty, after the one before counts again; three candidates wait all the time."""
    holder = await known(mode, members)
    lease, _ = await held_everywhere(mode, holder, members, renew=True)
    leading = await mode.keep(holder.election("e", ttl=MAX_TTL).campaign())
    candidates = [await known(mode, members) for _ in range(3)]
    waiting = [asyncio.ensure_future(each.election("e", ttl=MAX_TTL).campaign()) for each in candidates]
    for member in members:
        crash(member)
        await until(lambda member=member: not abstains(member))
        await until(lambda member=member: holder_at(member) == lease.token)
        await until(lambda member=member: holder_at(member, "e") == leading.token)
    for each in (lease, leading):
        assert not each.lost.is_set()
        each.ensure()
    assert not any(each.done() for each in waiting)
    leader = await candidates[0].election("e", ttl=MAX_TTL).leader()
    assert (leader.token, leader.term) == (leading.token, leading.term)
    assert await lease.release()
    assert await leading.resign()
    done, pending = await asyncio.wait(waiting, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    (next_leading,) = [await each for each in done]
    assert next_leading.term > leading.term
    for each in candidates:
        await each.close()
    await asyncio.gather(*pending, return_exceptions=True)


@rule(6, 7, 10)
async def test_a_member_that_lost_a_lease_gets_it_back_and_forgets_it_by_the_release(mode, members):
    holder, other = await known(mode, members), await known(mode, members)
    lease, _ = await held_everywhere(mode, holder, members, renew=True)
    crash(members[0])
    await until(lambda: holder_at(members[0]) == lease.token)
    _, kind, fence, identity, *_ = record_at(members[0])
    assert (kind, int(fence)) == ("lock", lease.fence)
    assert identity == "-", "this is no grant of its own: its next fence is the clock"
    assert 0 < ask(members[0], "PTTL", "lock:a") <= MAX_TTL * 1000
    await until(lambda: not abstains(members[0]))
    members[1].kill()  # so the votes of two count, of which one was granted anew
    lease.ensure()
    assert isinstance(await outcome(other.lock("a", ttl=1).acquire(timeout=0.5)), AcquireTimeout)
    assert holder_at(members[0]) == lease.token
    assert await lease.release()
    assert holder_at(members[0]) is None
    members[1].restart()
    later = await other.lock("a", ttl=1).acquire(timeout=PATIENCE)
    assert later.fence > lease.fence
    assert await later.release()


class Late(Proxy):
    """A proxy that loses a connection at the first request which says "regrant". A test sends that itself, later."""

    kept: bytes = b""

    def _request(self, client, data) -> None:
        if not self.kept and b"$7\r\nregrant\r\n" in data:  # and not the text of the script
            self.kept = data
            self.frozen |= {client, self.pairs[client]}
        else:
            super()._request(client, data)

    def deliver(self) -> None:
        """Let the request arrive now."""
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(self._server())
            late.sendall(self.kept)
            assert late.recv(1000).startswith(b"*1\r\n")  # a reply of the script


@rule(8, 10)
@pytest.mark.parametrize("again", [False, True], ids=["once", "and restarted again"])
async def test_a_regrant_that_arrives_after_the_release_grants_nothing(mode, members, again):
    """The client gives up the member that has not answered. What it sent there arrives when the lease is over."""
    with Late(members[0].socket) as line:
        holder = await known(mode, [line, *members[1:]])
        lease, _ = await held_everywhere(mode, holder, members, renew=True)
        crash(members[0])
        await until(lambda: line.kept)
        assert await lease.release()
        await until(lambda: has_tombstone(members[0], lease.token))
        if again:
            crash(members[0])
            await new(mode, members).lock("a").inspect()  # so it knows the script, and abstains anew
        line.deliver()
        assert holder_at(members[0]) is None
        await holder.close()


@rule(9, 10)
async def test_a_regrant_takes_no_lock_from_another_program(mode, members):
    """Which set the key by itself, while the message was under way."""
    with Late(members[0].socket) as line:
        holder = await known(mode, [line, *members[1:]])
        lease, _ = await held_everywhere(mode, holder, members, renew=True)
        crash(members[0])
        await until(lambda: line.kept)
        ask(members[0], "SET", "lock:a", "theirs", "PX", 60_000)
        line.deliver()
        assert holder_at(members[0]) == "theirs"
        assert await lease.release()
        await holder.close()


# Members that can't vote


async def config_error(locks) -> str:
    """The text of the ConfigError of a caller."""
    error = await outcome(locks.lock("a").acquire(timeout=1))
    assert isinstance(error, ConfigError), error
    return str(error)


@rule(10)
@each_client
@pytest.mark.parametrize("written", ["of another type", "of a later version"])
async def test_a_voter_record_of_somebody_else_is_named_and_kept(mode, members, who, written):
    locks = await client(mode, members, who)
    for each in members[:2]:
        if written == "of another type":
            ask(each, "DEL", VOTER)
            ask(each, "RPUSH", VOTER, "theirs")
            ask(each, "EXPIRE", VOTER, 600)
        else:
            write_voter(each, f"2 {info(each)['master_replid']} what only later versions know")
    text = await config_error(locks or new(mode, members))
    assert VOTER in text
    assert any(str(each.socket) in text for each in members[:2])
    for each in members[:2]:
        assert ask(each, "TYPE", VOTER) == ("list" if written == "of another type" else "string")


@rule(10)
async def test_words_that_a_later_version_adds_to_a_voter_record_are_kept(mode, members):
    for each in members:
        record = VoterRecord(info(each)["master_replid"], voter_of(each).since_ms, 0)
        write_voter(each, f"{record.encode()} more words")
    await (await new(mode, members).lock("a").acquire(timeout=1)).release()
    for each in members:
        words = ask(each, "GET", VOTER).split()
        assert (words[3], words[4:]) == (f"{MAX_TTL * 1000:.0f}", ["more", "words"])


async def test_a_member_that_is_a_replica_is_named(mode, members, spare):
    """Whose data is that of another server, which has its own vote, or is no member."""
    known_before = await known(mode, members)
    for each in members[:2]:
        await follow(each, spare)
    assert str(members[0].socket) in (text := await config_error(new(mode, members)))
    assert "is a replica, but a quorum needs single servers that are independent of each other" in text
    assert isinstance(await outcome(known_before.lock("a").acquire(timeout=1)), LockError)


async def test_a_member_that_lies_in_a_cluster_is_named(mode, members, server_pool):
    cluster = server_pool.cluster("valkey-9.1")
    text = await config_error(new(mode, [*members[:2], cluster.nodes[0]]))
    assert str(cluster.nodes[0].socket) in text
    assert "is a node of a cluster, but a quorum needs single servers" in text


async def test_an_address_that_comes_to_lead_to_another_member_is_named_with_that_one(mode, members, caplog):
    one, two, third = members
    with Name(one) as a, Name(two) as b:
        locks = await known(mode, [a, b, third])
        lead_to(b, one)
        await (await locks.lock("a").acquire(timeout=PATIENCE)).release()
        words = ("the same server", a.proxy.path, b.proxy.path)
        await until(lambda: any(all(word in text for word in words) for text in caplog.messages))
        lead_to(b, two)
        await until(lambda: all(node.is_up for node in real(locks)._session.server.nodes))
        await locks.close()


@rule(10)
@each_client
async def test_a_member_that_refuses_info_does_not_vote_and_is_named(mode, members, who):
    """Nobody could say whether it has lost leases. Two have, and their user has lost the right."""
    for each in members:
        ask(each, "ACL", "SETUSER", "blind", "reset", "on", ">x", "~*", "&*", "+@all")
    urls = [f"redis://blind:x@127.0.0.1:{each.port}/0" for each in members]
    locks = mode.interlock(urls, max_ttl=MAX_TTL)
    if who == "known":
        await (await locks.lock("a").acquire(timeout=PATIENCE)).release()
    for each in members[:2]:
        ask(each, "FLUSHALL")
        ask(each, "ACL", "SETUSER", "blind", "-info")
    text = await config_error(locks)
    assert any(f"127.0.0.1:{each.port}" in text for each in members[:2])
    bold = mode.interlock(urls, quarantine=False)
    await (await bold.lock("a").acquire(timeout=PATIENCE)).release()


@rule(10)
async def test_a_full_member_goes_on_to_count_though_its_record_is_old(mode, members):
    """Calls renew the TTL of the voter record after a month. No grant needs memory here, but renewals must count."""
    lease, _ = await held_everywhere(mode, await known(mode, members), members, renew=True)
    for each in members:
        ask(each, "PEXPIRE", VOTER, 40 * 86_400_000)
        ask(each, "CONFIG", "SET", "maxmemory", 1)
    try:
        deadline = lease._grant.hold.deadline
        await until(lambda: lease._grant.hold.deadline > deadline + 1.5)  # after two renewals at least
        await until(lambda: min(ask(each, "PTTL", VOTER) for each in members) > 80 * 86_400_000)
        lease.ensure()
    finally:
        for each in members:
            ask(each, "CONFIG", "SET", "maxmemory", 0)


@rule(10)
@each_client
async def test_one_member_with_a_record_of_a_later_version_is_only_absent(mode, members, who):
    """As during an upgrade, which must stop no process."""
    locks = await client(mode, members, who)
    write_voter(members[0], f"2 {info(members[0])['master_replid']} what only later versions know")
    await (await (locks or new(mode, members)).lock("a").acquire(timeout=PATIENCE)).release()


@rule(10)
async def test_a_client_without_quarantine_is_granted_at_once_and_starts_no_clock(mode, members):
    for each in members:
        ask(each, "FLUSHALL")
    await (await new(mode, members, quarantine=False).lock("a").acquire(timeout=1)).release()
    assert [voter_of(each) for each in members] == [None] * 3


@rule(6)
async def test_a_member_that_answers_nothing_is_not_asked_to_judge_itself(mode, members):
    """The round would wait for it once more, and renewals would be late."""
    locks = await known(mode, members)
    node = mode.session(locks).server.nodes[2]
    judged = node.judged_run_id
    assert judged
    members[2].kill()
    await (await locks.lock("a").acquire(timeout=PATIENCE)).release()
    await until(lambda: not node.is_up)
    assert node.judged_run_id == judged
    assert not node.stragglers


@rule(8)
async def test_a_job_that_waits_for_its_quorum_ends_with_its_interlock(mode, members, caplog):
    caplog.set_level("INFO", "interlock")
    locks = new(mode, members, max_ttl=60)
    for member in members:
        ask(member, "FLUSHALL")
    waits = asyncio.create_task(outcome(locks.once("job", at_most=60).run(work_of(mode))))
    await until(lambda: "until its quorum grants again" in caplog.text)
    await locks.close()
    assert isinstance(await asyncio.wait_for(waits, 10), LockError)


@rule(6)
async def test_a_member_that_could_not_judge_itself_counts_once_it_can(mode, members):
    """The first try found another version's record at two of three; the second one must not know that any more."""
    for member in members[:2]:
        ask(member, "SET", VOTER, "2 of a later version", "EX", 60)
    locks = new(mode, members)
    with pytest.raises(ConfigError, match="another type or version"):
        await locks.lock("a").acquire(timeout=PATIENCE)
    for member in members[:2]:
        ask(member, "DEL", VOTER)
        member.kill()
    members[0].restart()
    await (await locks.lock("a").acquire(timeout=PATIENCE)).release()


@rule(1, 6)
async def test_a_process_that_starts_while_an_address_leads_elsewhere_works_once_it_leads_back(mode, members):
    """The client first takes the address that had moved for the right one, and then learns that by a new connection."""
    with Name(members[0]) as a, Name(members[1]) as b:
        a.node = members[1]
        locks = new(mode, [a, b, members[2]])
        with pytest.raises(ConfigError, match="same server"):
            await locks.lock("a").acquire(timeout=PATIENCE)
        a.node = members[0]  # open connections still lead to the other member
        await (await locks.lock("a").acquire(timeout=PATIENCE)).release()
        await until(lambda: all(node.is_up for node in mode.session(locks).server.nodes))
