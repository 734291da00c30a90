"""Real servers, both modes, and what must hold after every test."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import inspect
import math
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import redis

from harness.headers import Header
from harness.matrix import BASE, BASE_CELLS, MODES, Cell, RunsOn, ServerPool
from harness.modes import Mode, Residue
from harness.proxy import Proxy
from harness.servers import Node
from harness.shards import Shard, commit, note
from harness.topology import Cluster, Independents, Sentinels, empty
from interlock._api import misuse_warnings
from interlock._servers import single
from interlock._transports.asyncio.pool import AsyncioPool
from interlock._transports.blocking.pool import BlockingPool

# A suite that a shell started in the background inherits ignored signals, and so would every process that a test
# interrupts: it would never end.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


misuse_warnings._has_warned_of_loop.set()  # tests do that on purpose; test_self_wait.py is about the warning

if hasattr(redis.utils, "get_lib_version"):  # each client of a test looks it up in the metadata of redis-py: 1 to 3 ms
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

# Processes that a test starts import the rig and the simulator, too, and what `scripts/test --oldest` put first.
PLANTED = os.environ.get("PLANTED")  # the copy of interlock that is tested: see plants/nets.py
FIRST = [
    path
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if path and (sys.prefix in path or path == PLANTED)
]
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (*FIRST, Path(__file__).parent, Path(__file__).parent.parent)))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run on what runs_on(full=...) says")
    parser.addoption(
        "--shard", type=Shard.parse, metavar="N/ALL", help="run one of so many pieces, and note its result"
    )
    parser.addoption("--each-server", action="store_true", help="run each test of the matrix on each kind of server")


BUSY = {
    "test_simulator", "test_simulator_servers", "test_simulator_quorum", "test_simulator_snapshots", "test_exhaustive",
    "test_scripts", "test_simulator_beliefs",
}  # fmt: skip
# Their tests wait for failovers and processes, for minutes in sum: at the end of the run the cores would wait, too.
PATIENT = {"test_cluster", "test_sentinel", "test_run"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Let tests that compute come first, on as many workers as there are cores; the others mostly wait.

    Those that share the `reports` of many runs go to one worker, which computes these reports once. Beside them, each
    module of PATIENT waits on a worker of its own, which starts its servers once.
    """
    busy = [item for item in items if item.path.stem in BUSY]
    for i, item in enumerate(busy):
        number = 0 if "reports" in item.fixturenames else i % (os.cpu_count() or 1)
        item.add_marker(pytest.mark.xdist_group(f"busy {number}"))
    for item in items:
        if item.path.stem in PATIENT:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items[:] = [*busy, *(item for item in items if item.path.stem not in BUSY)]
    if not config.getoption("full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if shard := config.getoption("shard"):
        config.hook.pytest_deselected(items=[item for item in items if not shard.has(item.nodeid)])
        items[:] = [item for item in items if shard.has(item.nodeid)]
    for item in items:  # for --junit-xml, from which scripts/versions counts
        if isinstance(cell := getattr(item, "callspec", None) and item.callspec.params.get("cell"), Cell):
            item.user_properties.append(("server", cell.kind))


def pytest_terminal_summary(terminalreporter, config):
    """Note the result of one piece of the suite, and print those of all of its pieces."""
    if (shard := config.getoption("shard")) is None or config.getoption("collectonly"):
        return
    stats = terminalreporter.stats
    result = {
        "commit": commit(), "passed": len(stats.get("passed", ())), "skipped": len(stats.get("skipped", ())),
        "failed": len(stats.get("failed", ())) + len(stats.get("error", ())),
        "seconds": round(time.time() - terminalreporter._session_start.time),
    }  # fmt: skip
    for line in note(shard, "full" if config.getoption("full") else "default", result):
        terminalreporter.write_line(line)


def pytest_collection_finish():
    """Freeze the objects of now: the search for leaks after each test need not look through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_stays_for_the_run_is_frozen():
    """Freeze what earlier modules have left for good: fixtures of the session, and modules that were imported late.

    A socket that an earlier module left open is no fault of the test that comes first here. Each test looks for what it
    has left itself (`Residue.none`).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.freeze()


def said_by(node) -> RunsOn:
    """Where a test runs: the marks of its module and its own, together."""
    said = RunsOn.said_by(reversed([*node.iter_markers("runs_on")]))
    if node.config.getoption("each_server") and said.servers != "its own servers":
        return dataclasses.replace(said, servers="each server in both modes", full=None, quorum=False)
    return said


def pytest_generate_tests(metafunc):
    """Give each test its cells of the matrix: all of them if it asks for `mode`, else each kind of server once."""
    node, fixtures = metafunc.definition, {*metafunc.fixturenames}
    if "cell" not in fixtures:
        return
    cells = said_by(node).cells(
        full=metafunc.config.getoption("full"),
        marks={mark.name for mark in node.iter_markers()},
        arguments={*node._fixtureinfo.argnames},
        fixtures=fixtures,
    )
    if "mode" in fixtures:
        metafunc.parametrize("cell", cells, indirect=True, ids=str)
    elif node.get_closest_marker("runs_on"):
        kinds = list(dict.fromkeys(cell.kind for cell in cells))
        metafunc.parametrize("cell", [Cell(kind, "unix", MODES[0]) for kind in kinds], indirect=True, ids=kinds)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """An `async def` test is one run of a loop, which then closes the Interlocks of its `mode` and looks for leaks."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def whole() -> None:
        # In debug mode a loop logs each step that took 0.1 s. On a busy machine any may, and tests count records.
        asyncio.get_running_loop().slow_callback_duration = math.inf
        residue = Residue()
        modes = [value for value in pyfuncitem.funcargs.values() if isinstance(value, Mode)]
        try:
            async with asyncio.timeout(60):
                await pyfuncitem.obj(**arguments)
        finally:
            for mode in modes:
                await mode.close()
        await residue.none()

    cell = pyfuncitem.funcargs.get("cell")
    # Debug mode, on by -X dev, keeps the stack of each callback: a third of the time of a test of asyncio. What it
    # finds depends on no kind of server, so one kind is enough.
    debug = pyfuncitem.config.getoption("full") and (cell is None or cell.kind == BASE)
    with asyncio.Runner(debug=debug, loop_factory=loop_of(cell)) as runner:
        runner.run(whole())
    return True


class CheckedLoop(asyncio.SelectorEventLoop):
    """A loop that refuses callbacks of other threads, as one in debug mode does."""

    def call_soon(self, callback, *args, context=None):
        self._check_thread()
        return super().call_soon(callback, *args, context=context)


def loop_of(cell):
    """The function that makes the event loop of a test."""
    if cell is None or cell.way != "uvloop":
        return CheckedLoop
    return pytest.importorskip("uvloop").new_event_loop


# What the running test used: (topology, kind of server), and modes.
USED: set[tuple[str, str]] = set()
USED_MODES: set[str] = set()


def noted(function, topology):
    """The same function; each call notes that the running test uses such a topology of the `kind` in its arguments."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        USED.add((topology, signature.bind(*args, **kwargs).arguments.get("kind", BASE)))
        return function(*args, **kwargs)

    return call


class FailuresAtOnce:
    """Writes each failure when it happens: with --full the summary comes after an hour."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}")


def pytest_sessionstart(session):
    """Let a long run write its failures at once."""
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if session.config.getoption("full") and terminal is not None:  # a worker of xdist has none
        session.config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_configure():
    """Note what the tests start, and which servers of the pool they use."""
    for kind, topology in ((Node, "server"), (Cluster, "cluster"), (Sentinels, "sentinel"), (Independents, "quorum")):
        kind.__init__ = noted(kind.__init__, topology)
    for name, topology in (("node", "server"), ("cluster", "cluster"), ("primary", "sentinel"), ("quorum", "quorum")):
        setattr(ServerPool, name, noted(getattr(ServerPool, name), topology))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    USED.clear()
    USED_MODES.clear()


@pytest.fixture(autouse=True)
def a_test_runs_where_its_module_says(request):
    """Fail a test that uses a server or a mode which its `runs_on` does not name."""
    yield
    if not request.node.get_closest_marker("runs_on"):
        return
    callspec = getattr(request.node, "callspec", None)
    cell, said = callspec and callspec.params.get("cell"), said_by(request.node)
    for topology, kind in USED:
        assert said.allows(topology, kind, cell), f"the test uses a {topology} of {kind}, and runs_on() does not say so"
    assert {*said.modes.split(", ")} >= USED_MODES, f"the test uses {USED_MODES}, and runs_on() does not say so"


def noting(mode_name, take):
    """`take` of a pool, which also notes that the running test uses this mode."""

    def noted_take(pool):
        USED_MODES.add(mode_name)
        return take(pool)

    return noted_take


HEADERS: dict[str, Header] = {}


@pytest.fixture(autouse=True)
def every_message_is_as_the_lua_header_says(monkeypatch):
    """Fail a test that sends a message which the header of its script does not describe."""
    real, wrong = single.evalsha, []

    def checked(script, keys, args, stamp):
        if (header := HEADERS.get(script.name)) is None:
            header = HEADERS[script.name] = Header(script.source)
        try:
            header.check(keys, args)
        except AssertionError as error:
            wrong.append(error)  # a background task would take it for one more failure of the network
            raise
        return real(script, keys, args, stamp)

    monkeypatch.setattr(single, "evalsha", checked)
    for mode_name, pool in zip(MODES, (BlockingPool, AsyncioPool), strict=True):
        monkeypatch.setattr(pool, "take", noting(mode_name, pool.take))
    yield
    assert not wrong


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory):
    """The servers of this run of pytest."""
    made = ServerPool(tmp_path_factory.mktemp("server_pool"))
    yield made
    made.stop()


@pytest.fixture
def cell(request) -> Cell:
    """On which kind of server, by which way, and in which mode the test runs."""
    return getattr(request, "param", BASE_CELLS[0])


@pytest.fixture
def server(server_pool, cell):
    """The running server of this cell."""
    return server_pool.at(cell)


@pytest.fixture
def redis_client(server):
    """A plain client of `server`, with which a test looks at the keys."""
    if isinstance(server, Cluster):
        client = redis.RedisCluster("127.0.0.1", server.nodes[0].port)
        client.keys = functools.partial(
            client.keys, target_nodes=redis.RedisCluster.PRIMARIES
        )  # else those of one node
    else:
        client = redis.Redis.from_url(server.url)
    yield client
    client.close()


@pytest.fixture
def clean(redis_client, server):
    """Empties the server before the test, and fails if a key without a TTL is left after it."""
    if together := getattr(server, "together", ()):  # a quorum
        empty(*together)
    else:
        redis_client.flushall()
    yield redis_client
    eternal = [key for key in redis_client.scan_iter() if redis_client.ttl(key) == -1 and not key.startswith(b"users:")]
    assert not eternal, f"keys without a TTL: {eternal}"


@pytest.fixture
def mode(cell, server, clean):
    """Threads or asyncio: makes the Interlocks of the test, on `server`, in the way of `cell`."""
    return Mode(cell, server)


@pytest.fixture
def proxy(server):
    """A proxy in front of `server`, which plays a bad network."""
    with Proxy(server.socket) as made:
        yield made


@pytest.fixture
def node(server_pool, cell):
    """A server of the cell's kind for this test alone, which may harm it."""
    with server_pool.spare(cell.kind) as made:
        yield made


@pytest.fixture
def client(node):
    """A plain client of `node`, with which a test looks at the keys; it reconnects by itself."""
    made = redis.Redis.from_url(node.url)
    yield made
    made.close()
