"""Passwords that change while clients are connected, and services that refuse some commands, as managed ones do."""

from __future__ import annotations

import asyncio
import re

import pytest
import redis
import redis.asyncio
import redis.sentinel

from harness.clock import machine_time
from harness.groups import started
from harness.matrix import BASE
from harness.modes import outcome, until, waiting
from harness.servers import Node
from harness.topology import Sentinels
from harness.topology.group import ask
from interlock import ConfigError, LeaseState
from interlock._connect.address import _warn_of_defaults
from interlock._protocol.run_to_end import run
from interlock._protocol.timing import FOREVER
from interlock._transports.handshake import _warn_of_name
from interlock._transports.resp import pack

pytestmark = pytest.mark.runs_on(
    "valkey-9.1", starts="servers without some commands, a cluster, servers with sentinels"
)
ALL = ("~*", "&*", "+@all")
CLOSING = ("CLIENT", "KILL", "USER", "rotates")


class Rotating(redis.CredentialProvider):
    """Credentials that change."""

    def __init__(self, password="first") -> None:
        self.password = password
        self.asked = 0

    def get_credentials(self):
        self.asked += 1
        return "rotates", self.password

    async def get_credentials_async(self):
        return self.get_credentials()


def create_user(nodes, password):
    """Make the user on each server, with this password only, and close its connections."""
    for node in nodes:
        ask(node, "ACL", "SETUSER", "rotates", "reset", "on", f">{password}", *ALL)
        ask(node, *CLOSING)


def rotate(nodes, provider, password, *, close=True):
    """Change the password of the user without a gap, and perhaps close its connections."""
    for node in nodes:
        ask(node, "ACL", "SETUSER", "rotates", f">{password}")
    former, provider.password = provider.password, password
    for node in nodes:
        ask(node, "ACL", "SETUSER", "rotates", f"<{former}")
        if close:
            ask(node, *CLOSING)


def drop(nodes):
    for node in nodes:
        ask(node, "ACL", "DELUSER", "rotates")


async def outlives_a_rotation(mode, nodes, client, provider):
    """A lease goes on, and a waiter gets its turn, while the password changes twice."""
    locks, others = mode.interlock(client), mode.interlock(client)
    lease = await mode.keep(locks.lock("a", ttl=20).acquire())
    call = asyncio.ensure_future(others.lock("a").acquire(30))
    await until(lambda: waiting(locks.lock("a"), 1))
    for password in ("second", "third"):
        asked = provider.asked
        rotate(nodes, provider, password)
        await lease.extend(20)
        assert provider.asked > asked
    rotate(nodes, provider, "fourth", close=False)
    await lease.extend(20)  # open connections go on
    await lease.release()
    assert await (await call).release()


async def test_a_lease_outlives_a_new_password_on_one_server(mode, node):
    create_user([node], "first")
    provider = Rotating()
    library = redis if mode.name == "threads" else redis.asyncio
    client = library.Redis(unix_socket_path=str(node.socket), credential_provider=provider)
    mode.clients.append(client)
    await outlives_a_rotation(mode, [node], client, provider)


async def test_a_lease_outlives_a_new_password_on_a_cluster(mode, server_pool):
    cluster = server_pool.clean_cluster(BASE)
    create_user(cluster.nodes, "first")
    provider = Rotating()
    library = redis if mode.name == "threads" else redis.asyncio
    client = library.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, credential_provider=provider)
    mode.clients.append(client)
    try:
        await outlives_a_rotation(mode, cluster.nodes, client, provider)
    finally:
        drop(cluster.nodes)


@pytest.fixture(scope="module")
def group():
    with started(Sentinels, BASE, replicas=1) as made:
        yield made


async def test_a_lease_outlives_a_new_password_behind_sentinels(mode, group):
    create_user(group.nodes, "first")
    provider = Rotating()
    library = redis.sentinel if mode.name == "threads" else redis.asyncio.sentinel
    places = [("127.0.0.1", each.port) for each in group.sentinels]
    client = library.Sentinel(places).master_for("mymaster", credential_provider=provider)
    mode.clients.append(client)
    await outlives_a_rotation(mode, [group.primary], client, provider)


async def test_an_old_password_is_refused_at_once_and_the_right_one_helps(mode, node):
    create_user([node], "first")
    provider = Rotating()
    library = redis if mode.name == "threads" else redis.asyncio
    client = library.Redis(unix_socket_path=str(node.socket), credential_provider=provider)
    mode.clients.append(client)
    locks = mode.interlock(client)
    held = await mode.keep(locks.lock("held", ttl=6).acquire())
    create_user([node], "second")
    begun = machine_time()
    error = await outcome(locks.lock("a").acquire(30))
    assert machine_time() - begun < 10
    assert isinstance(error, ConfigError)
    assert "refuses the user name and password that Rotating returned" in str(error)
    assert "first" not in str(error)
    await until(lambda: held.state is LeaseState.JEOPARDY)
    provider.password = "second"
    await until(lambda: held.state is LeaseState.HELD)  # the renewals have gone on
    assert await held.release()


async def test_a_connection_whose_login_the_server_ends_is_replaced(mode, node):
    """As services do when a token has expired: they go on to answer, NOAUTH."""
    create_user([node], "first")
    ask(node, "ACL", "SETUSER", "default", "resetpass", ">of-the-default-user")
    locks = mode.interlock(f"unix://rotates:first@{node.socket}")
    lease = await mode.keep(locks.lock("a").acquire())
    pool = mode.session(locks).server.pool

    async def log_out():
        connection = pool.take() or await pool.checkout(FOREVER)
        await connection.exchange(pack(("RESET",)), FOREVER)
        connection.checkin()

    for _ in range(2):
        await (mode.in_thread(run, log_out()) if mode.name == "threads" else log_out())
        await lease.extend(20)
    assert await lease.release()


@pytest.mark.parametrize(
    ("login", "says"),
    [
        ("rotates:wrong@", "of 'rotates' is wrong, or the user is disabled"),
        (":wrong@", "of 'default' is wrong, or the user is disabled"),
        ("hidden@", r"of the user \(without a password\) is wrong"),
        ("", r"missing\. Put them into the URL"),
    ],
)
async def test_the_error_for_a_wrong_login_names_the_user_and_the_way_out(mode, node, login, says):
    create_user([node], "first")
    ask(node, "ACL", "SETUSER", "default", "resetpass", ">of-the-default-user")
    begun = machine_time()
    error = await outcome(mode.interlock(f"unix://{login}{node.socket}").lock("a").acquire(30))
    assert machine_time() - begun < 10
    assert isinstance(error, ConfigError)
    assert re.search(says, str(error))
    assert "wrong@" not in str(error)
    assert "hidden" not in str(error)


# Services that refuse some commands

COMMANDS = ("CONFIG", "INFO", "CLIENT", "COMMAND", "PUBSUB")
SAYS = {"INFO": "there is no quarantine", "CLIENT": "CLIENT LIST will not show it"}


async def works(mode, target):
    """A lock is handed over, a semaphore and a latch work."""
    locks, others = mode.interlock(target), mode.interlock(target)
    lease = await locks.lock("a").acquire()
    call = asyncio.ensure_future(others.lock("a").acquire(30))
    await until(lambda: waiting(locks.lock("a"), 1))
    await lease.release()
    assert await (await call).release()
    assert await (await others.semaphore("s", 2).acquire()).release()
    assert await locks.latch("l", 1).count_down() == 0
    return locks


@pytest.mark.parametrize("missing", [*([each] for each in COMMANDS), COMMANDS], ids="+".join)
async def test_a_server_without_some_commands_is_used_with_less(mode, caplog, missing):
    _warn_of_name.cache_clear()
    with started(Node, BASE, config={f"rename-command {each}": '""' for each in missing}) as node:
        locks = await works(mode, f"{node.url}?client_name=shop")
        for command, says in SAYS.items():
            told = [record for record in caplog.records if says in record.getMessage()]
            once = 2 if command == "INFO" else 1  # once for each Interlock; once for each server
            assert len(told) == once * (command in missing)
        if "COMMAND" in missing:
            lease = await locks.lock("a").acquire()
            assert await lease.execute("SET", "x", "1", "PX", "9000", keys=["x"])
            error = await outcome(lease.execute("SET", "x", "1"))
            assert isinstance(error, ConfigError)
            assert "only COMMAND may be missing, if lease.execute() gets keys=" in str(error)
            await lease.release()
        for made in mode.made:
            await made.close()
        mode.made.clear()


async def test_a_server_without_hello_is_named(mode):
    with started(Node, BASE, config={"rename-command HELLO": '""'}) as node:
        error = await outcome(mode.interlock(node.url).lock("a").acquire(5))
        assert isinstance(error, ConfigError)
        assert "its configuration renames the command" in str(error)


LESS = ("-config", "-info", "-client", "-command", "-pubsub")


@pytest.mark.parametrize("less", [*([each] for each in LESS), LESS], ids=" ".join)
async def test_a_user_without_some_rights_connects_with_less(mode, server, clean, caplog, less):
    _warn_of_name.cache_clear()
    ask(server, "ACL", "SETUSER", "rotates", "reset", "on", ">pw", *ALL, *less)
    try:
        await works(mode, f"unix://rotates:pw@{server.socket}?client_name=shop")
        assert (SAYS["INFO"] in caplog.text) == ("-info" in less)
        assert (SAYS["CLIENT"] in caplog.text) == ("-client" in less)
        for made in mode.made:
            await made.close()
        mode.made.clear()
    finally:
        drop([server])


async def test_the_error_of_a_user_who_may_not_connect_names_the_rights(mode, server, clean):
    ask(server, "ACL", "SETUSER", "rotates", "reset", "on", ">pw", *ALL, "-select")
    try:
        error = await outcome(mode.interlock(f"unix://rotates:pw@{server.socket}?db=1").lock("a").acquire(5))
        assert isinstance(error, ConfigError)
        assert "Give this user the rights" in str(error)
        assert "NOPERM" in str(error)
    finally:
        drop([server])


async def test_a_cluster_and_sentinels_are_used_with_less(mode, server_pool, group, caplog):
    _warn_of_defaults.cache_clear()
    cluster = server_pool.clean_cluster(BASE)
    for nodes, url in ((cluster.nodes, cluster.url), (group.nodes, group.url)):
        for node in nodes:
            ask(node, "ACL", "SETUSER", "rotates", "reset", "on", ">pw", *ALL, *LESS)
        caplog.clear()
        await works(mode, url.replace("://", "://rotates:pw@", 1))
        assert SAYS["INFO"] in caplog.text
        assert "assumes the server's default" in caplog.text
        for made in mode.made:
            await made.close()
        mode.made.clear()
        drop(nodes)
