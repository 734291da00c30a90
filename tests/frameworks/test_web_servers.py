"""Real web servers, each with web_app.py: who forks before or after the app was loaded, and how requests run.

An Interlock at module level works in each of them, whatever the process did with it before it forked.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import interlock
from harness.commands import Command
from harness.modes import wait_until
from harness.processes import lives
from harness.servers import free_ports
from interlock._protocol.tokens import Token

HERE = Path(__file__).parent
TTL = 1.5  # as in web_app.py
WITHIN = 20.0  # seconds for each answer, and for what must happen: less than the 30 s of a default ttl
LOAD = 60  # requests
SOURCES = str(Path(interlock.__file__).parents[1])
OLD_UWSGI = Path(sys.prefix) / "uwsgi-old"


class Kind(NamedTuple):
    """One way to serve the app."""

    words: tuple[str, ...]
    at_once: int  # requests that surely run at the same time
    preloads: bool  # the app is loaded in the process that then forks


GUNICORN = ("gunicorn", "--chdir", str(HERE), "--bind", "127.0.0.1:{port}", "--graceful-timeout", "10")
UWSGI = ("uwsgi", "--master", "--die-on-term", "--need-app", "--http-socket", "127.0.0.1:{port}", "--module", "web_app")
HOOKS = ("--enable-threads", "--py-call-uwsgi-fork-hooks")
UVICORN = ("uvicorn", "--app-dir", str(HERE), "--port", "{port}", "web_app_asyncio:application")


def gunicorn(*options: str, app: str = "web_app", at_once: int) -> dict[bool, Kind]:
    words = (*GUNICORN, *options)
    return {
        False: Kind((*words, f"{app}:application"), at_once, preloads=False),
        True: Kind((*words, "--preload", f"{app}:application"), at_once, preloads=True),
    }


SYNC = gunicorn("-w", "3", at_once=3)
GTHREAD = gunicorn("-k", "gthread", "-w", "2", "--threads", "4", at_once=4)
GEVENT = gunicorn("-k", "gevent", "-w", "2", at_once=8)
ASGI = gunicorn("-k", "asgi", "-w", "2", app="web_app_asyncio", at_once=8)
KINDS = {
    "gunicorn sync": SYNC[False],
    "gunicorn sync, preload": SYNC[True],
    "gunicorn gthread": GTHREAD[False],
    "gunicorn gthread, preload": GTHREAD[True],
    "gunicorn gevent": GEVENT[False],
    "gunicorn gevent, preload": GEVENT[True],
    "gunicorn asgi, preload": ASGI[True],
    "uvicorn": Kind((*UVICORN, "--workers", "2"), 8, preloads=False),
    "uWSGI": Kind((*UWSGI, "--enable-threads", "--processes", "3"), 3, preloads=True),
    "uWSGI threads": Kind((*UWSGI, "--threads", "4", "--processes", "2"), 4, preloads=True),
    "uWSGI lazy": Kind((*UWSGI, "--enable-threads", "--lazy-apps", "--processes", "3"), 3, preloads=False),
    "uWSGI osafterfork": Kind(
        (*UWSGI, "--enable-threads", "--py-call-osafterfork", "--processes", "3"), 3, preloads=True
    ),
    "uWSGI gevent": Kind(
        (*UWSGI, "--gevent", "10", "--gevent-monkey-patch", "--processes", "2"), 8, preloads=True
    ),
    "uWSGI hooks": Kind((*UWSGI, *HOOKS, "--processes", "3"), 3, preloads=True),
    "uWSGI hooks threads": Kind((*UWSGI, *HOOKS, "--threads", "4", "--processes", "2"), 4, preloads=True),
}  # fmt: skip


def befores(kind: str) -> tuple[str, ...]:
    """What the module does before the fork. Without its hooks uWSGI forks while another thread may run Python."""
    if not KINDS[kind].preloads or (kind.startswith("uWSGI") and "hooks" not in kind):
        return ("made",)
    return ("made", "used") if "asgi" in kind else ("made", "held")


WAYS = [pytest.param(kind, before, id=f"{kind}, {before}") for kind in KINDS for before in befores(kind)]


class Web:
    """A running web server."""

    def __init__(self, command: Command, port: int) -> None:
        self.command, self.port = command, port

    def get(self, path: str) -> dict:
        """Ask once. Raises AssertionError if the answer is no 200, or takes long."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200, f"{path}: {answer.status}\n{self.command.output}"
            said = json.loads(answer.read())
        except TimeoutError:
            raise AssertionError(f"{path}: no answer within {WITHIN} s\n{self.command.output}") from None
        finally:
            connection.close()
        assert Token.parse(said["token"]).process.pid == said["pid"]
        return said

    def serves(self) -> bool:
        try:
            return bool(self.get("/section/first"))
        except OSError:
            assert self.command.running, self.command.output
            return False

    def workers(self) -> list[int]:
        return [pid for pid in self.command.children() if lives(pid)]


@pytest.fixture
def serve(tmp_path, clean, server):
    """Start a web server, and wait until it answers."""
    started = []

    def served(words: tuple[str, ...], before: str = "made", **env: str) -> Web:
        port = free_ports()[0]
        program = Path(sys.executable).parent / words[0]  # or a whole path
        if not program.exists():
            pytest.skip(f"{words[0]} is not installed")
        argv = [sys.executable, str(program), *(each.format(port=port) for each in words[1:])]
        path = os.pathsep.join(
            (str(HERE), SOURCES, sysconfig.get_path("purelib"))
        )  # uWSGI forgets its venv at a reload
        env = {"INTERLOCK_URL": server.url, "BEFORE": before, "PYTHONPATH": path, **env}
        command = Command(argv, cwd=tmp_path, log=tmp_path / "log", env=env)
        started.append(command)
        web = Web(command, port)
        wait_until(web.serves, 60)
        return web

    yield served
    for each in started:
        each.kill_all()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


@pytest.fixture
def locks(server):
    with interlock.Interlock(server.url) as made:
        yield made


def holder_of(locks, name):
    """The process that holds this lock; None if nobody does."""
    token = locks.lock(name).inspect().holder
    return token and Token.parse(token).process.pid


@pytest.mark.parametrize(("kind", "before"), WAYS)
def test_an_interlock_at_module_level_excludes_renews_and_is_seen(kind, before, serve, pool, clean, locks):
    words, at_once, preloads = KINDS[kind]
    web = serve(words, before)
    answers = [each.result() for each in [pool.submit(web.get, "/section/a") for _ in range(LOAD)]]
    assert int(clean.get("users:count:a")) == LOAD
    assert len({each["fence"] for each in answers}) == LOAD
    assert all((each["imported_in"] != each["pid"]) == preloads for each in answers)

    names = [f"hold:{i}" for i in range(at_once - 1)]
    holding = [pool.submit(web.get, f"/hold/{each}") for each in names]
    wait_until(lambda: clean.llen("users:held") == len(names), WITHIN)
    longer = pool.submit(web.get, "/long/b")  # beside them, for twice its ttl
    longer = longer.result()
    shown = {each.name: each.holders for each in locks.ls("hold:*")}
    clean.set("users:go", 1)
    pids = {name: each.result()["pid"] for name, each in zip(names, holding, strict=True)}
    assert {name: [each.pid for each in holders] for name, holders in shown.items()} == {
        name: [pid] for name, pid in pids.items()
    }
    assert sorted(map(int, clean.lrange("users:held", 0, -1))) == sorted(pids.values())
    if before == "held":
        assert holder_of(locks, "master") == web.command.pid
        web.get("/inherit/c")
        assert json.loads(clean.get("users:inherited")) == ["lost", False, True]
        assert holder_of(locks, "master") == web.command.pid
    web.command.end(within=WITHIN)
    wait_until(lambda: not locks.ls(), WITHIN)


ENDING = ["gunicorn sync, preload", "gunicorn gthread, preload", "gunicorn gevent, preload", "uWSGI hooks"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("kind", ENDING)
def test_a_worker_that_ends_gives_back_its_own_and_nothing_of_its_master(kind, number, serve, clean, locks):
    web = serve(KINDS[kind].words, "held")
    ended = web.get("/keep/mine")["pid"]
    assert holder_of(locks, "mine") == ended
    os.kill(ended, number)
    locks.lock("mine").acquire(timeout=TTL + WITHIN).release()
    wait_until(lambda: not lives(ended), WITHIN)
    assert web.get("/section/a")["pid"] != ended
    assert holder_of(locks, "master") == web.command.pid


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gunicorn sync, preload", ("--max-requests", "5")),
        ("gunicorn gevent, preload", ("--max-requests", "5")),
        ("uWSGI hooks", ("--max-requests", "5", "--min-worker-lifetime", "0")),
    ],
)
def test_workers_that_are_replaced_after_some_requests_lose_nothing(kind, options, serve, pool, clean, locks):
    words = KINDS[kind].words
    web = serve((words[0], *options, *words[1:]), "held")
    answers = []

    def replaced():
        """One more round: a worker of gevent ends within a second, and may answer a hundred requests meanwhile."""
        answers.extend(each.result() for each in [pool.submit(web.get, "/section/a") for _ in range(LOAD)])
        return len({each["pid"] for each in answers}) > 3

    wait_until(replaced, WITHIN)
    assert int(clean.get("users:count:a")) == len({each["fence"] for each in answers}) == len(answers)
    assert holder_of(locks, "master") == web.command.pid


@pytest.mark.parametrize("kind", ["gunicorn sync, preload", "gunicorn gevent, preload", "uWSGI hooks"])
def test_a_reload_replaces_the_workers_and_what_they_held_is_free(kind, serve, clean, locks):
    """gunicorn's master goes on, and holds what it held; that of uWSGI begins again, under the same process id."""
    web = serve(KINDS[kind].words, "held")
    ended = web.get("/keep/mine")["pid"]
    web.command.send(signal.SIGHUP)
    locks.lock("mine").acquire(timeout=TTL + WITHIN).release()
    wait_until(lambda: not lives(ended), WITHIN)
    wait_until(web.serves, WITHIN)
    wait_until(lambda: holder_of(locks, "master") == web.command.pid, WITHIN)


def old_uwsgi(*options: str) -> tuple[str, ...]:
    return (str(OLD_UWSGI / "bin" / "uwsgi"), *UWSGI[1:], *options)


@pytest.mark.skipif(not OLD_UWSGI.exists(), reason="no uWSGI of that age for this Python")
def test_a_uwsgi_that_runs_no_threads_gets_an_error_that_names_the_option(serve, start):
    """uWSGI 2.0.27 and later always run threads."""
    path = os.pathsep.join((str(OLD_UWSGI), str(HERE)))
    words = [each.format(port=free_ports()[0]) for each in old_uwsgi()]
    command = start(*words, env={"INTERLOCK_URL": "redis://127.0.0.1:1", "PYTHONPATH": path})
    assert command.ended() != 0
    assert "ConfigError: uWSGI runs no threads here" in command.output
    assert "--enable-threads" in command.output
    assert serve(old_uwsgi("--enable-threads"), PYTHONPATH=path).get("/long/a")["pid"]
