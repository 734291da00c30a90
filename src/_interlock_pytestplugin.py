"""The pytest plugin of interlock: a private server for each process that runs tests, and Interlocks on it.

The page "Testing your own code" says how to use it. pytest imports this module at each start, in every project that has
interlock installed. So it stands beside the package, and imports nothing of it before a fixture is used: it costs
nothing then, and a measurement of the coverage of a program misses no import.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from interlock import Interlock
    from interlock.aio import Interlock as AsyncioInterlock
    from interlock.testing import BreakableServer

SERVER = pytest.StashKey["BreakableServer"]()
URL_OPTION = "interlock_url"
NO_SERVER = ValueError, ConnectionError  # ConfigError and Unavailable, without an import of interlock
NO_SERVER_TEXT = "interlock: the tests get no private server: %s"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini(
        URL_OPTION,
        "true: start a private server before anything of the program is imported, set $INTERLOCK_URL to its URL for "
        "the whole run, and empty the server before each test",
        type="bool",
        default=False,
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Set $INTERLOCK_URL for the whole run, if the ini option says so: before a conftest.py or Django's settings."""
    if early_config.getini(URL_OPTION):
        try:
            os.environ["INTERLOCK_URL"] = _server_of(early_config).url
        except NO_SERVER as error:
            raise pytest.UsageError(NO_SERVER_TEXT % error) from None
        early_config.pluginmanager.register(WholeRun(), "interlock-whole-run")
    yield


class WholeRun:
    """A plugin for a run with the ini option."""

    @pytest.fixture(autouse=True)
    def _interlock_server_for_each_test(self, interlock_server: BreakableServer) -> None:
        """Empty the server also before a test that asks for no fixture."""


@pytest.fixture(scope="session")
def interlock_session_server(pytestconfig: pytest.Config) -> BreakableServer:
    """The private server of this process (with pytest-xdist: of this worker). Only `interlock_server` empties it."""
    try:
        return _server_of(pytestconfig)
    except NO_SERVER as error:
        why = NO_SERVER_TEXT % error
    pytest.fail(why, pytrace=False)


@pytest.fixture
def interlock_server(interlock_session_server: BreakableServer) -> BreakableServer:
    """The private server: running, empty, and without a quarantine when the test begins, whatever was before."""
    interlock_session_server.reset()
    return interlock_session_server


@pytest.fixture
def interlock_url(interlock_server: BreakableServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the private server, which is also in $INTERLOCK_URL during the test."""
    monkeypatch.setenv("INTERLOCK_URL", interlock_server.url)
    return interlock_server.url


@pytest.fixture
def interlock_locks(interlock_server: BreakableServer) -> Iterator[Interlock]:
    """An Interlock for threads on the private server, closed after the test."""
    from interlock import Interlock  # noqa: PLC0415 (not before a test asks for it)

    with Interlock(interlock_server.url) as locks:
        yield locks


@pytest.fixture
def interlock_aio_locks(interlock_server: BreakableServer) -> Iterator[AsyncioInterlock]:
    """An Interlock for asyncio on the private server, for whatever runs the test: pytest-asyncio, anyio, asyncio.run.

    It belongs to no event loop before it is used in one, and is closed in each loop with that loop or after the test.
    """
    from interlock.compat._self_closing import SelfClosingInterlock  # noqa: PLC0415 (not before a test asks for it)

    locks = SelfClosingInterlock(interlock_server.url)
    yield locks
    locks.close_in_idle_loops()


def _server_of(config: pytest.Config) -> BreakableServer:
    """The server of this process, started with the first call. Raises ConfigError or Unavailable."""
    from interlock.testing import BreakableServer  # noqa: PLC0415 (not before a test asks for it)

    server = config.stash.get(SERVER, None)
    if server is None:
        server = config.stash[SERVER] = BreakableServer()
        config.add_cleanup(server.stop)
    server.start()  # nothing, if that is done
    return server
