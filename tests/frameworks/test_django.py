"""Django: real projects under gunicorn, uvicorn and runserver, with kills; and the project's own tests, run by Django.

The project is `django_project/`. Its own tests (`manage.py test`) are about what one process does: transactions, names,
settings, checks, the middleware, commands and fences. Here are the processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import interlock
import interlock.embedded
from harness import postgres
from harness.modes import wait_until
from harness.processes import state_of
from harness.servers import free_ports

pytest.importorskip("django")
pytestmark = pytest.mark.runs_on("valkey-9.1")

PROJECT = Path(__file__).parent / "django_project"
TTL = 2.0  # of the locks of the views
SLACK = 10.0  # seconds that a busy machine may take for what takes a moment
CLIENTS, REQUESTS, ORDERS = 6, 90, 3


@pytest.fixture(scope="module")
def cluster():
    with postgres.running() as running:
        yield running


class Project:
    """The project, with its locks on one server and its data in one database."""

    def __init__(self, start, folder: Path, databases: dict, url: str, place: Path = PROJECT) -> None:
        self._start, self.place = start, place
        self.url = url
        self.env = {
            "SHOP_DATABASES": json.dumps(databases),
            "SHOP_INTERLOCK": json.dumps({"default": {"URL": url, "OPTIONS": {"max_ttl": 3, "label": "shop"}}}),
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_RUNTIME_DIR": str(folder),
        }
        self.started = []

    def start(self, *words: str, **env: str):
        command = self._start(*words, cwd=self.place, env={**self.env, **env})
        self.started.append(command)
        return command

    def manage(self, *words: str, status: int = 0, within: float = 90.0, **env: str) -> str:
        """Run a management command, and return what it printed."""
        command = self.start("manage.py", *words, **env)
        assert command.ended(within) == status, command.output
        return command.output

    def gunicorn(self, *options: str, **env: str) -> Web:
        command = self.start(
            "-m", "gunicorn", "wsgi:application", "--bind", "127.0.0.1:0", "--threads", "3", "--graceful-timeout", "20",
            *options, **env,
        )  # fmt: skip
        return Web(command, r"Listening at: http://127\.0\.0\.1:(\d+)")

    def uvicorn(self, *options: str, **env: str) -> Web:
        command = self.start("-m", "uvicorn", "asgi:application", "--port", "0", *options, **env)
        return Web(command, r"running on http://127\.0\.0\.1:(\d+)")


class Web:
    """A web server that answers."""

    def __init__(self, command, listening: str) -> None:
        self.command = command
        (said,) = command.says(listening)[:1]
        self.port = int(re.search(r":(\d+)$", said)[1])
        wait_until(self.answers, 60)

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("who")[0] == 200
        return False

    def get(self, path: str, timeout: float = 60.0) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def sqlite(folder: Path) -> dict:
    return {
        alias: {
            "ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / f"{alias}.db"), "OPTIONS": {"timeout": 30},
        }
        for alias in ("default", "other")
    }  # fmt: skip


def on_postgres(cluster, name: str) -> dict:
    common = {
        "ENGINE": "django.db.backends.postgresql", "HOST": str(cluster.folder), "PORT": "5432", "USER": "interlock",
    }  # fmt: skip
    import psycopg

    with psycopg.connect(cluster.conninfo, autocommit=True) as admin:
        for alias in ("default", "other"):
            admin.execute(f'CREATE DATABASE "{name}_{alias}"')
    return {alias: {**common, "NAME": f"{name}_{alias}"} for alias in ("default", "other")}


@pytest.fixture(params=["sqlite", "postgres"])
def database(request, tmp_path):
    if request.param == "sqlite":
        return sqlite(tmp_path)
    return on_postgres(request.getfixturevalue("cluster"), f"shop_{secrets.token_hex(4)}")


@pytest.fixture
def project(start, tmp_path, database, server, clean):
    """With its tables."""
    made = Project(start, tmp_path, database, server.url)
    made.manage("migrate", "-v", "0")
    return made


only_on = pytest.mark.parametrize("database", ["postgres"], indirect=True)
only_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


# The project's own tests


def test_the_tests_of_a_project_pass(start, tmp_path, database, server, clean):
    """Run by Django, as its users do: TestCase and TransactionTestCase on both databases, the rest once."""
    project = Project(start, tmp_path, database, server.url)
    is_sqlite = "sqlite" in database["default"]["ENGINE"]
    labels = [] if is_sqlite else ["shop.tests.test_until_commit", "shop.tests.test_fence"]
    try:
        said = project.manage("test", "--noinput", *labels, within=180)
    finally:  # the check of embedded:// starts it, and it outlives its processes
        start("-m", "interlock", "server", "stop", "--force", env=project.env).ended(60)
    (ran,) = re.findall(r"Ran (\d+) tests", said)
    assert int(ran) >= (105 if is_sqlite else 75), said
    assert ("skipped" in said) == is_sqlite, said


# Under load, with kills


def fails(web: Web, path: str) -> None:
    """A client whose worker is killed."""
    with pytest.raises(OSError):
        web.get(path)


def shoppers(web: Web, path: str, requests: int = REQUESTS):
    """Clients that ask for this path, order after order. Returns the answers, and the times that they took."""
    answers, times, left = [], [], list(range(requests))

    def shop() -> None:
        while True:
            try:
                number = left.pop()
            except IndexError:
                return
            began = time.monotonic()
            try:
                answers.append((number % ORDERS + 1, *web.get(path.format(number % ORDERS + 1))))
            except (OSError, http.client.HTTPException):  # its worker was killed, perhaps in mid-answer
                answers.append((number % ORDERS + 1, 0, ""))
            times.append(time.monotonic() - began)

    threads = [threading.Thread(target=shop) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    return threads, answers, times


def orders_of(web: Web) -> dict[int, tuple[int, int]]:
    """Of each order its stock, and how many notes its buyers have committed; makes them if they are not there."""
    status, text = web.get(f"orders/{ORDERS}")
    assert status == 200
    return {int(pk): tuple(counts) for pk, counts in json.loads(text).items()}


@only_on
def test_gunicorn_with_kills_loses_nothing_and_does_nothing_twice(project):
    """Workers are killed and reloaded while all of them count in transactions: each count is that of its commits."""
    web = project.gunicorn("--workers", "3", "--preload")
    orders_of(web)
    threads, answers, times = shoppers(web, "buy/{}?pause=0.01")
    for kills in (1, 2, 3):
        wait_until(lambda kills=kills: len(answers) >= kills * REQUESTS // 6, 120)
        os.kill(web.command.children()[0], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(answers) == REQUESTS
    assert {status for _, status, _ in answers} <= {200, 0}, answers
    for pk, (stock, notes) in orders_of(web).items():
        done = sum(order == pk and status == 200 for order, status, _ in answers)
        killed = sum(order == pk and status == 0 for order, status, _ in answers)
        assert stock == notes, "a count was lost, or done without its note"
        assert done <= stock <= done + killed, "an answer was given for nothing, or a commit was done twice"
    assert sum(status == 200 for _, status, _ in answers) >= REQUESTS - 3 * 3 * 2
    assert max(times) < 3 * (TTL + 1) + REQUESTS / ORDERS * 0.2 + SLACK, "somebody was stuck"
    assert web.command.end() == 0


@only_on
def test_the_trap_is_real(project):
    """The control: unlocked before the commit, the same code loses counts."""
    web = project.gunicorn("--workers", "3")
    orders_of(web)
    threads, answers, _ = shoppers(web, "careless/{}?pause=0.05", requests=30)
    for thread in threads:
        thread.join(60)
    assert [status for _, status, _ in answers] == [200] * 30
    assert sum(stock for stock, _ in orders_of(web).values()) < 30


@only_on
def test_the_next_one_gets_the_lock_of_a_killed_worker_within_its_ttl(project):
    web = project.gunicorn("--workers", "2")
    orders_of(web)
    thread = threading.Thread(target=fails, args=(web, "buy/1?pause=120"))
    thread.start()
    with interlock.Interlock(project.url) as locks:
        wait_until(lambda: locks.lock("shop.order:1").inspect().holder)
        _, pid, *_ = locks.lock("shop.order:1").inspect().holder.split("/")
    os.kill(int(pid), signal.SIGKILL)
    killed = time.monotonic()
    status, text = web.get("buy/1?pause=0.001")
    assert (status, json.loads(text)["stock"]) == (200, 1), "the transaction of the killed worker counted"
    assert time.monotonic() - killed < TTL + 1 + SLACK
    thread.join(20)
    assert orders_of(web)[1] == (1, 1)


@only_sqlite
def test_a_preloaded_project_has_connected_to_nothing_before_the_fork(project, redis_client):
    """Each worker connects anew, at its first lock, and holds under a name of its own."""
    before = {each["id"] for each in redis_client.client_list()}

    def connected() -> int:
        return len({each["id"] for each in redis_client.client_list()} - before)

    web = project.gunicorn("--workers", "2", "--preload")
    assert connected() == 0
    wait_until(lambda: web.get("busy/a")[0] == 200 and connected() > 0)
    orders_of(web)
    workers = web.command.children()
    with interlock.Interlock(project.url) as locks:
        thread = threading.Thread(target=web.get, args=("buy/1?pause=1",))
        thread.start()
        wait_until(lambda: locks.lock("shop.order:1").inspect().holder)
        assert int(locks.lock("shop.order:1").inspect().holder.split("/")[1]) in workers
        thread.join(30)
    assert web.command.end() == 0
    wait_until(lambda: connected() == 0)


# What is wrong, or away, at the start


@only_sqlite
def test_a_cache_that_is_not_redis_is_an_error_at_the_start(project):
    env = {"SHOP_INTERLOCK": '{"default": {"CACHE": "default"}}'}
    command = project.start("-m", "gunicorn", "wsgi:application", "--bind", "127.0.0.1:0", **env)
    assert command.ended(60) != 0
    assert "INTERLOCK['default'] (CACHE: 'default')" in command.output
    assert "LocMemCache does not keep its keys on Redis or Valkey" in command.output
    said = project.manage("check", status=1, **env)
    assert "interlock.E001" in said
    assert "Traceback" not in said


@only_sqlite
def test_a_server_that_is_away_when_the_project_starts_is_said_once(start, tmp_path, database, node):
    project = Project(start, tmp_path, database, node.url)
    node.kill()
    web = project.gunicorn("--workers", "1")
    for _ in range(3):
        assert web.get("busy/a")[0] == 503
    assert web.get("who")[0] == 200
    assert len(re.findall("are answered with 503", web.command.output)) == 1
    node.restart()
    wait_until(lambda: web.get("busy/a?timeout=5")[0] == 200)


# ASGI, and the server of a developer


@only_sqlite
def test_two_processes_under_asgi_exclude_each_other(project):
    one, two = project.uvicorn(), project.uvicorn()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(one.get("ahold/a?pause=3")))
    thread.start()
    wait_until(lambda: two.get("abusy/a")[0] == 423)
    assert two.get("busy/a")[0] == 423
    assert two.get("abusy/b")[0] == 200
    assert json.loads(two.get("abusy/a")[1])["lock"] == "a"
    thread.join(30)
    assert answers == [(200, "done")]
    assert two.get("abusy/a")[0] == 200
    # A process that is killed in the middle keeps nobody out for longer than its ttl.
    thread = threading.Thread(target=fails, args=(one, "ahold/a?pause=120"))
    thread.start()
    wait_until(lambda: two.get("abusy/a")[0] == 423)
    one.command.send(signal.SIGKILL)
    killed = time.monotonic()
    assert two.get("abusy/a?timeout=30")[0] == 200
    assert time.monotonic() - killed < TTL + 1 + SLACK
    thread.join(20)
    assert two.command.end() in {0, -signal.SIGTERM}


@only_sqlite
def test_runserver_reloads(start, tmp_path, database, server, clean):
    place = tmp_path / "project"
    shutil.copytree(PROJECT, place, ignore=shutil.ignore_patterns("__pycache__"))
    project = Project(start, tmp_path, database, server.url, place)
    port, _ = free_ports()
    command = project.start("manage.py", "runserver", str(port), "--skip-checks")
    web = Web.__new__(Web)
    web.command, web.port = command, port
    wait_until(web.answers, 60)
    assert web.get("busy/a")[0] == 200
    first = web.get("who")[1]
    views = place / "shop" / "views.py"
    views.write_text(views.read_text().replace('HttpResponse("mine")', 'HttpResponse("ours")'))

    def reloaded() -> bool:
        views.touch()  # it may have been changed before the reloader looked at it for the first time
        time.sleep(0.5)  # and a reload takes longer than this
        with contextlib.suppress(OSError):
            return web.get("busy/a") == (200, "ours")
        return False

    wait_until(reloaded, 60)
    assert web.get("who")[1] != first


# Commands


@only_sqlite
def test_one_of_four_machines_runs_a_command_and_the_others_skip_it(project, tmp_path):
    report = tmp_path / "report"
    commands = [project.start("manage.py", "nightly", str(report), "--pause", "0.3") for _ in range(4)]
    assert [each.ended(90) for each in commands] == [0] * 4
    said = [each.output for each in commands]
    assert len(report.read_text().splitlines()) == 1
    assert sum(each.strip() == "done" for each in said) == 1, said
    assert sum(each.startswith("skipped: ") for each in said) == 3, said


@only_sqlite
def test_another_machine_runs_the_command_of_one_that_was_killed(project):
    first = project.start("manage.py", "slow")
    first.says("runs")
    assert project.manage("slow").startswith("skipped: ")
    first.send(signal.SIGKILL)
    killed = time.monotonic()
    with interlock.Interlock(project.url) as locks:
        wait_until(
            lambda: locks.once("command:slow", at_most=3).inspect().running is None, 3 + 1 + SLACK
        )  # max_ttl is 3
    second = project.start("manage.py", "slow")
    second.says("runs|skipped")
    assert "runs" in second.output
    assert time.monotonic() - killed < 3 + 1 + 2 * SLACK


# The page and the example

SETTINGS = """
import os
SECRET_KEY = "of the page"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "urls"
INSTALLED_APPS = ["shop"]
MIDDLEWARE = []
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SHOP_DATA"]}}
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "locks": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": "redis://localhost:6379/0"},
}
"""
VIEWS = """
from django.db import transaction
from django.http import HttpResponse
from shop.models import Order
"""
URLS = """
from django.urls import path
from shop import views, wrong
urlpatterns = [path(f"{each.__name__}/<int:pk>", each) for each in (views.buy, views.buy_fenced)]
urlpatterns += [path("wrong/<int:pk>", wrong.buy)]
"""
TRY_IT = """
from concurrent.futures import ThreadPoolExecutor
from django.test import Client
from interlock.contrib.django import locks
from shop.models import Order

Order.objects.create()
answers = [Client().get(f"/{path}/1") for path in ("buy", "buy_fenced", "wrong", "buy")]
assert [answer.content for answer in answers] == [b"9", b"8", b"7", b"6"], answers
with ThreadPoolExecutor(1) as another_thread:
    lease = another_thread.submit(locks["reports"].lock("shop.order:1").acquire).result()
assert Client().get("/buy_fenced/1").status_code == 423
lease.release()
print("tried")
"""


@pytest.fixture
def own_server():
    """A server on which no other test has run `nightly` just now."""
    with interlock.embedded.Server() as own:
        yield own


def test_the_project_of_the_page_works(start, server, own_server, tmp_path):
    """The page's blocks of code, each put into the file that its first line names."""
    page = Path(__file__).parents[2] / "docs" / "frameworks" / "django.md"
    place = tmp_path / "project"
    blocks = re.findall(r"^```py\n# (\S+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    files = {"settings.py": SETTINGS, "shop/views.py": VIEWS, "shop/wrong.py": VIEWS, "urls.py": URLS}
    files["shop/wrong.py"] += "from interlock.contrib.django import locks\n"
    for name, code in blocks:
        files[name] = files.get(name, "") + code.replace("timeout=5", "timeout=0.5")
    files |= {f"{folder}/__init__.py": "" for folder in ("shop", "shop/management", "shop/management/commands")}
    files["manage.py"] = (PROJECT / "manage.py").read_text()
    for name, code in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(code.replace("redis://localhost:6379/0", own_server.url))
    assert {name for name, _ in blocks} == {
        "settings.py", "shop/views.py", "shop/wrong.py", "shop/models.py", "shop/management/commands/nightly.py",
    }  # fmt: skip
    assert page.read_text().count("```py\n") == len(blocks)
    env = {"SHOP_DATA": str(tmp_path / "data"), "PYTHONDONTWRITEBYTECODE": "1"}
    for words, said in (
        (("check",), "no issues"),
        (("migrate", "--run-syncdb", "-v", "0"), ""),
        (("shell", "-c", TRY_IT), "tried"),
        (("nightly",), "the report"),
        (("nightly",), "skipped: "),
        (("locks", "ls"), ""),
    ):
        command = start("manage.py", *words, cwd=place, env=env)
        assert command.ended(60) == 0, command.output
        assert said in command.output


def test_the_example_sells_each_seat_once(start, server, clean, tmp_path):
    """As its README says: one command, then 20 buyers at once for 10 seats."""
    port, _ = free_ports()
    example = Path(__file__).parents[2] / "examples" / "django"
    env = {
        "SHOP_DATA": str(tmp_path / "shop.sqlite3"), "INTERLOCK_URL": server.url, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    web = Web.__new__(Web)
    web.command, web.port = start(example / "start.py", str(port), env=env), port

    def status(path: str, data: bytes | None = None) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", data, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def serves() -> bool:
        with contextlib.suppress(OSError):
            return status("seats/1") == 200
        return False

    wait_until(serves, 90)
    with ThreadPoolExecutor(20) as buyers:
        bought = [*buyers.map(lambda _: status("seats/1/buy", b""), range(20))]
    assert sorted(bought) == [200] * 10 + [409] * 10, web.command.output
    assert json.loads(web.get("seats/1")[1]) == {"show": "The Tempest", "left": 0, "sold": 10}
    assert status("admin/login/") == 200
    nightly = start(example / "manage.py", "nightly", env=env)
    assert nightly.ended(60) == 0
    assert "10 tickets sold" in nightly.output


# A holder that was stopped


def test_a_late_write_is_refused_by_the_data(project):
    """And the same process does the damage without the guard, so it was not the lock that held it."""
    late = project.start("manage.py", "late")
    late.says("all hold")
    wait_until(lambda: state_of(late.pid) == "T")
    newer = results(project.manage("late", "--newer"))
    assert newer == dict.fromkeys(("claim", "name", "update", "guard", "commit"), (None, "newer"))
    late.send(signal.SIGCONT)
    assert late.ended(60) == 0, late.output
    refused = results(late.output)
    assert refused.pop("commit") == ("LeaseLost", "newer"), late.output
    assert refused == dict.fromkeys(("claim", "name", "update", "guard"), ("StaleFence", "newer")), late.output
    said = project.manage("shell", "-c", "from shop.models import Paper; print({p.words for p in Paper.objects.all()})")
    assert "{'unguarded'}" in said


def results(output: str) -> dict[str, tuple[str | None, str]]:
    found = map(json.loads, re.findall(r"^\{.*\}$", output, re.MULTILINE))
    return {each["way"]: (each["error"], each["written"]) for each in found}
