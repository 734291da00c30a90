"""Two processes of uvicorn with an app of FastAPI, on real sockets: loaded, killed, stopped, and counted."""

from __future__ import annotations

import functools
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.commands import Command, python
from harness.matrix import BASE_CELLS
from harness.modes import wait_until
from interlock import Interlock
from interlock.testing import BreakableServer

TTL = 2.0  # as in fastapi_program.py
TAKEOVER = TTL + 1 + 15  # seconds until somebody has the lock of a dead holder; the rest is for a busy machine


UVICORN = ("-m", "uvicorn", "fastapi_program:app", "--app-dir", Path(__file__).parent, "--port", "0")


class App:
    """One process of uvicorn with fastapi_program."""

    def __init__(self, command):
        self.command = command
        self.http = httpx.Client(timeout=60, verify=False, trust_env=False, limits=httpx.Limits())

    @functools.cached_property
    def port(self):
        return int(self.command.says(r"running on http://127.0.0.1:\d+")[0].rpartition(":")[2])

    def post(self, path, **kwargs):
        return self.http.post(f"http://127.0.0.1:{self.port}{path}", **kwargs)


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    """A directory: a file in it ends the holder of that name."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture
def go(gates):
    return lambda name: (gates / name).touch()


@pytest.fixture(scope="module")
def shared(server_pool, tmp_path_factory, gates):
    """Two processes that no test harms."""
    home = tmp_path_factory.mktemp("shared")
    env = {"INTERLOCK_URL": server_pool.at(BASE_CELLS[0]).url, "GO": str(gates)}
    made = [Command(python(*UVICORN), cwd=home, log=home / f"{i}.log", env=env) for i in range(2)]
    apps = [App(each) for each in made]
    try:
        yield apps
    finally:
        for each in apps:
            each.http.close()
            each.command.kill_all()


@pytest.fixture
def begin(start, server, gates):
    """Start so many processes at once, for this test alone."""

    every = []

    def begun(number, url=server.url, options=(), **environment):
        made = [
            App(start(*UVICORN, *options, env={"INTERLOCK_URL": url, "GO": str(gates), **environment}))
            for _ in range(number)
        ]
        every.extend(made)
        for each in made:
            assert each.port
        return made

    yield begun
    for each in every:
        each.http.close()


with_shared = pytest.mark.xdist_group("fastapi, shared")  # one worker, and so one pair of processes


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as made:
        yield made


@pytest.fixture
def locks(server):
    with Interlock(server.url) as made:
        yield made


def log_of(client, name):
    return [each.decode() for each in client.lrange(f"users:log:{name}", 0, -1)]


def waits(locks, name, number=1):
    wait_until(lambda: len(locks.lock(name).inspect().waiters) == number)


@with_shared
def test_under_load_nothing_is_lost_and_nothing_happens_twice(shared, pool, redis_client):
    paths = [f"/{kind}/{name}" for kind in ("add", "add_in_thread") for name in ("a", "b")]
    answered = [pool.submit(shared[i % 2].post, paths[i // 2 % 4]) for i in range(400)]
    answers = [each.result() for each in answered]
    assert [each.status_code for each in answers] == [200] * 400
    assert {name: int(redis_client.get(f"users:sum:{name}")) for name in "ab"} == {"a": 200, "b": 200}
    assert len({(each.url.path[-1], each.json()) for each in answers}) == 400  # a fence each


@with_shared
def test_a_busy_name_is_423_with_a_time_and_without_a_holder(shared, pool, redis_client, go):
    one, other = shared
    held = pool.submit(one.post, "/hold/busy")
    wait_until(lambda: log_of(redis_client, "busy"))
    token = redis_client.get("lock:busy").decode()
    answer = other.post("/try/busy")
    assert (answer.status_code, answer.headers["retry-after"]) == (423, "1")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["lock"] == "busy"
    for secret in {token, *token.split("/"), str(one.command.pid), "127.0.0.1"} - {"busy"}:
        assert secret not in answer.text
    go("busy")
    assert held.result().status_code == 200
    assert other.post("/try/busy").json() > held.result().json()


def test_a_killed_holder_is_replaced_within_its_ttl_and_no_count_is_lost(begin, pool, redis_client, locks):
    one, other = begin(2)
    held = pool.submit(one.post, "/hold/killed")
    wait_until(lambda: log_of(redis_client, "killed"))
    waiting = pool.submit(other.post, "/add/killed")
    waits(locks, "killed")
    one.command.send(signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(httpx.TransportError):
        held.result()
    assert waiting.result().status_code == 200
    assert time.monotonic() - killed < TAKEOVER
    assert redis_client.get("users:sum:killed") == b"1"


def test_kills_in_the_middle_of_a_load_leave_nobody_stuck(begin, pool, redis_client):
    """Each answer 200 is counted once; a request whose process died counts once or not at all."""
    one, other = begin(2)
    answered = [pool.submit((one, other)[i % 2].post, "/add/load") for i in range(300)]
    wait_until(lambda: int(redis_client.get("users:sum:load") or 0) > 50)
    one.command.send(signal.SIGKILL)
    done, died = 0, 0
    for each in answered:
        try:
            done += each.result().status_code == 200
        except httpx.TransportError:
            died += 1
    assert done + died == 300
    assert done >= 150  # all of the one that lives
    # At most one request of the dead process was inside, and had written but not answered; up to 8 answers may have
    # been lost on their way out.
    assert done <= int(redis_client.get("users:sum:load")) <= done + min(died, 16)
    assert other.post("/add/load").status_code == 200


@with_shared
@pytest.mark.parametrize("endpoint", ["hold", "hold_in_thread"])
def test_a_holder_that_was_stopped_for_longer_than_its_ttl_answers_503(shared, pool, redis_client, locks, endpoint):
    (one, other), name = shared, f"stopped:{endpoint}"
    held = pool.submit(one.post, f"/{endpoint}/{name}")
    wait_until(lambda: log_of(redis_client, name))
    one.command.send(signal.SIGSTOP)
    assert other.post(f"/add/{name}").status_code == 200
    one.command.send(signal.SIGCONT)
    answer = held.result()
    assert answer.status_code == 503
    assert answer.json()["detail"] == f"the work under '{name}' was interrupted, and may be incomplete"
    assert "retry-after" not in answer.headers


@with_shared
def test_a_loss_cancels_an_async_endpoint_and_is_seen_by_one_in_a_thread(shared, pool, redis_client, locks):
    for endpoint, seen in (("hold", "cancelled"), ("hold_in_thread", "lost")):
        name = f"revoked:{endpoint}"
        held = pool.submit(shared[0].post, f"/{endpoint}/{name}")
        wait_until(lambda name=name: log_of(redis_client, name))
        assert locks.lock(name).revoke("the tests want it")
        assert held.result().status_code == 503
        assert log_of(redis_client, name)[1:] == [f"{seen} {shared[0].command.pid}"]
        assert shared[1].post(f"/try/{name}").status_code == 200


@with_shared
def test_a_client_that_leaves_gives_up_its_place(shared, pool, redis_client, locks, go):
    one, other = shared
    held = pool.submit(one.post, "/hold/left")
    wait_until(lambda: log_of(redis_client, "left"))
    with socket.create_connection(("127.0.0.1", other.port)) as gone:
        gone.sendall(b"POST /add/left HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        waits(locks, "left")
    waits(locks, "left", 0)
    assert "Traceback" not in other.command.output
    go("left")
    assert held.result().status_code == 200
    assert redis_client.get("users:sum:left") is None
    assert other.post("/add/left").status_code == 200


@with_shared
def test_a_body_that_nobody_has_read_is_whole_after_the_wait(shared, pool, redis_client, locks, go):
    one, other = shared
    held = pool.submit(one.post, "/hold/body")
    wait_until(lambda: log_of(redis_client, "body"))
    sizes = [0, 10, 60_000, 1_000_000]
    answers = [pool.submit(other.post, "/body/body", content=b"x" * size) for size in sizes]
    waits(locks, "body")  # those of one process share one place
    time.sleep(0.3)  # for as long as the watch reads what it may
    go("body")
    assert held.result().status_code == 200
    assert [each.result().json() for each in answers] == [{"size": size, "mine": "a state of my own"} for size in sizes]


@with_shared
def test_a_lease_ends_before_the_answer_or_after_the_background_tasks(shared, redis_client):
    answer = shared[0].post("/stream/s")
    assert answer.text.split() == ["0", "released", "1", "released", "2", "released"]
    wait_until(lambda: log_of(redis_client, "s") == ["background released"])
    answer = shared[0].post("/stream_under_lock/t")
    assert answer.text.split() == ["0", "held", "1", "held", "2", "held"]
    wait_until(lambda: log_of(redis_client, "t") == ["background held"])
    assert shared[1].post("/try/t").status_code == 200


def test_a_shutdown_ends_what_is_at_work_and_leaves_no_lock(begin, pool, redis_client, locks, go):
    one, other = begin(2)
    elsewhere, here = pool.submit(other.post, "/hold/term"), pool.submit(one.post, "/hold/mine")
    wait_until(lambda: log_of(redis_client, "term") and log_of(redis_client, "mine"))
    waiting = pool.submit(one.post, "/add/term")
    waits(locks, "term")
    one.command.send(signal.SIGTERM)
    one.command.says("Waiting for connections to close|Shutting down")
    for name, held in (("mine", here), ("term", elsewhere)):
        go(name)
        assert held.result().status_code == 200
    assert waiting.result().status_code == 200
    one.command.ended()
    assert "Application shutdown complete" in one.command.output
    assert "Traceback" not in one.command.output
    assert not locks.lock("term").inspect().held
    assert not locks.lock("mine").inspect().held
    assert redis_client.get("users:sum:term") == b"1"


def test_a_shutdown_that_cancels_requests_gives_back_what_they_hold_or_wait_for(begin, pool, redis_client, locks):
    """`--timeout-graceful-shutdown` cancels both: one holds, and one waits."""
    (one,) = begin(1, options=("--timeout-graceful-shutdown", "1"))
    held = locks.lock("forced:other").acquire()
    for path, name in (("hold", "forced"), ("add", "forced:other")):
        pool.submit(one.post, f"/{path}/{name}")
    wait_until(lambda: log_of(redis_client, "forced"))
    waits(locks, "forced:other")
    one.command.end(signal.SIGTERM)
    assert not locks.lock("forced").inspect().held
    waits(locks, "forced:other", 0)
    held.release()
    assert redis_client.get("users:sum:forced:other") is None


def test_an_app_starts_without_its_server_and_says_so_once(begin):
    with BreakableServer() as server:
        server.kill()
        (app,) = begin(1, url=server.url)
        assert len(app.command.says("The app starts all the same")) == 1
        answer = app.post("/try/away")
        assert (answer.status_code, answer.json()["detail"]) == (503, "'away' is not available now. Try again later")
        assert int(answer.headers["retry-after"]) >= 1
        assert server.url.removeprefix("unix://") not in answer.text
        server.restart()
        wait_until(lambda: app.post("/try/away").status_code == 200, 60)
        app.command.end()
        assert app.command.output.count("The app starts all the same") == 1


def ticks_of(client):
    """Who wrote each tick, and under which term."""
    return [tuple(map(int, each.split())) for each in client.lrange("users:ticks", 0, -1)]


def test_one_process_leads_and_another_follows_when_it_dies_stops_or_ends(begin, redis_client):
    by_pid = {each.command.pid: each for each in begin(3, LEADING="1")}

    def leader(without=()):
        wait_until(lambda: ticks_of(redis_client) and ticks_of(redis_client)[-1][0] not in without, TAKEOVER)
        return ticks_of(redis_client)[-1][0]

    first = leader()
    by_pid[first].command.send(signal.SIGSTOP)
    second = leader({first})
    by_pid[first].command.send(signal.SIGCONT)
    by_pid[second].command.send(signal.SIGKILL)
    third_leader = leader({second})
    rest = next(pid for pid in by_pid if pid not in {second, third_leader})
    by_pid[third_leader].command.end()
    assert leader({second, third_leader}) == rest
    by_pid[rest].command.end()
    terms = [term for _, term in ticks_of(redis_client)]
    assert terms == sorted(terms)  # nobody wrote after a later leader had begun
    assert len({(pid, term) for pid, term in ticks_of(redis_client)}) == len(set(terms))
    started = [each.decode().split() for each in redis_client.lrange("users:thing", 0, -1)]
    for pid in {first, third_leader, rest}:  # that were not killed: each start has its stop
        mine = [word for word, who in started if int(who) == pid]
        assert mine == ["start", "stop"] * (len(mine) // 2)
    assert "Traceback" not in by_pid[rest].command.output
