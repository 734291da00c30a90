"""The API limit: the flaw of each recipe, step by step, and the rows of `interlock demo semaphore`."""

from __future__ import annotations

import contextlib
import math
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from harness.demos import Rows, assert_one_line_and_64, assert_plan_follows_its_seed, rows, run, start
from interlock.cli.demo.api_limit import ApiLimit, Caller, count_open_calls, plan
from interlock.cli.demo.connection import BareConnection
from interlock.cli.demo.scenario import Context, Fault
from interlock.cli.demo.semaphore_recipes import SEMAPHORE_RECIPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from interlock.cli.demo.api_limit import Permit
    from interlock.embedded import Server

pytestmark = [
    pytest.mark.runs_on("its own servers", starts="an embedded server"),
    pytest.mark.xdist_group("demo semaphore"),  # they share a run of 20 s
]
NAMES = list(SEMAPHORE_RECIPES)
FAULTY = "semaphore --json --seed 3"
CALM = "semaphore --json --calls 20 --limit 2 --faults none"
TTL = 30.0  # seconds, in the step by step tests: no permit runs out


# Step by step: two clients, a real server, and clocks and pauses that are injected


class SharedSemaphore:
    """Clients of one semaphore of three permits, each with a clock of its own."""

    def __init__(self, recipe: str, url: str, stack: contextlib.ExitStack) -> None:
        self.recipe, self.url, self.stack = recipe, url, stack
        self.connection = stack.enter_context(contextlib.closing(BareConnection(url)))
        self.taken: list[Permit | None] = []  # a lease that is dropped would be missed

    def client(self, clock_offset: float = 0.0, meanwhile: Callable[[], object] | None = None) -> Caller:
        """A client whose clock is so many seconds ahead; `meanwhile` runs in the middle of its first try."""
        scenario = ApiLimit(
            recipe=SEMAPHORE_RECIPES[self.recipe],
            url=self.url,
            prefix="semaphore:",
            goal=1,
            limit=3,
            clients=1,
            ttl=TTL,
            max_stalls=math.inf,
            clock_offsets=(clock_offset,),
            faults={} if meanwhile is None else {1: Fault("slow", "taking")},
        )
        context = Context(scenario, lambda _fault, _seconds: meanwhile and meanwhile())
        self.stack.callback(context.locks.close)
        client = Caller(context, self.connection, timeout=0.0)
        if meanwhile is not None:
            client.take_number()
        return client

    def take(self, clock_offset: float = 0.0) -> Permit | None:
        self.taken.append(self.client(clock_offset).take())
        return self.taken[-1]

    def fill(self, permits: int = 3) -> list[Permit]:
        held = [self.take() for _ in range(permits)]
        assert all(held)
        return held

    def events(self) -> dict[bytes, bytes]:
        return self.connection.execute("HGETALL", "semaphore:events")


@pytest.fixture
def semaphore(request: pytest.FixtureRequest, embedded_server: Server) -> Iterator[SharedSemaphore]:
    with contextlib.ExitStack() as stack:
        semaphore = SharedSemaphore(request.param, embedded_server.url, stack)
        semaphore.connection.execute("FLUSHALL")
        yield semaphore


def on(*recipes: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("semaphore", recipes, indirect=True)


@on(*[name for name in NAMES if name != "no-limit"][1:])
def test_with_right_clocks_and_one_client_at_a_time_each_recipe_keeps_the_limit(semaphore: SharedSemaphore) -> None:
    held = semaphore.fill()
    assert semaphore.take() is None
    held.pop().release()
    assert semaphore.take()
    assert semaphore.take() is None


@on("one-set")
def test_one_set_gives_the_last_permit_to_a_second_client_whose_clock_is_behind(semaphore: SharedSemaphore) -> None:
    held = semaphore.fill()
    assert semaphore.take() is None
    fourth = semaphore.take(clock_offset=-1.0)
    assert fourth
    assert fourth.by_rank  # before the others, who have not lost anything that they could notice
    for permit in held:
        permit.release()
    assert semaphore.events() == {}


@on("two-sets")
def test_two_sets_give_the_last_permit_to_two_clients_if_one_is_slow_between_incr_and_zadd(
    semaphore: SharedSemaphore,
) -> None:
    semaphore.fill(2)
    last: list[Permit | None] = []
    slow = semaphore.client(meanwhile=lambda: last.append(semaphore.take())).take()
    assert last[0]
    assert slow  # both have the third of three
    assert slow.by_rank
    assert not last[0].by_rank
    assert semaphore.take() is None


@on("one-set", "two-sets", "lua")
def test_a_client_whose_clock_is_ahead_takes_permits_away_from_their_holders(semaphore: SharedSemaphore) -> None:
    held = semaphore.fill()
    assert semaphore.take() is None
    assert semaphore.take(clock_offset=TTL + 1)
    for permit in held:
        permit.release()
    assert semaphore.events() == {b"stolen": b"3"}


@on("two-sets", "lua")
def test_in_these_recipes_a_clock_that_is_behind_gains_nothing(semaphore: SharedSemaphore) -> None:
    semaphore.fill()
    assert semaphore.take(clock_offset=-1.0) is None


@on("one-set", "two-sets", "lua")
def test_a_clock_that_is_behind_by_the_timeout_gets_permits_that_count_for_nobody(semaphore: SharedSemaphore) -> None:
    semaphore.fill(2)
    assert semaphore.take(clock_offset=-TTL - 1)
    assert semaphore.take()


@on("incr-decr", "token-list", "lua-time", "interlock")
@pytest.mark.parametrize("clock_offset", [-TTL - 1, -1.0, 1.0, TTL + 1])
def test_the_other_recipes_read_no_clock_of_a_client(semaphore: SharedSemaphore, clock_offset: float) -> None:
    semaphore.fill(2)
    third = semaphore.take(clock_offset)
    assert third
    assert semaphore.take(clock_offset) is None
    assert semaphore.take() is None
    third.release()
    assert semaphore.events() == {}


@on("incr-decr", "token-list")
def test_a_permit_that_is_not_given_back_is_lost_for_good(semaphore: SharedSemaphore) -> None:
    for permit in semaphore.fill()[1:]:
        permit.release()
    assert semaphore.fill(2)
    assert semaphore.take() is None
    assert semaphore.connection.execute("TTL", "semaphore:lock") == -1


def test_the_log_shows_how_many_calls_were_open_and_which_were_too_many() -> None:
    def log(text: str) -> list[tuple[bytes, bytes]]:
        return [(call.encode(), b"by_rank" if call.isupper() else b"served") for call in text]

    assert count_open_calls([], 1) == (0, Counter())
    assert count_open_calls(log("abab"), 2) == (2, Counter(served=0))
    assert count_open_calls(log("aabbcc"), 1) == (1, Counter(served=0))
    assert count_open_calls(log("aba"), 1) == (2, Counter(served=1))
    assert count_open_calls(log("abCDacDb"), 2) == (3, Counter(served=1, by_rank=2))
    assert count_open_calls(log("aBaBcdcd"), 1) == (2, Counter(served=1, by_rank=1))


# The recipes


def test_rows_have_the_promised_shape(faulty: Rows) -> None:
    assert list(faulty) == NAMES
    for row in faulty.values():
        assert list(row) == ["name", "calls", "most", "too_many", "leaked", "seconds", "why"]
        assert (row["most"] > 5) == (row["too_many"] > 0)
        assert row["seconds"] > 0
        assert row["why"]


@pytest.mark.parametrize("name", ["no-limit", "process-limit", "one-set", "two-sets", "lua", "lua-time"])
def test_recipes_that_count_wrong_let_too_many_in(faulty: Rows, name: str) -> None:
    assert faulty[name]["too_many"] > 0
    assert faulty[name]["calls"] == 120


@pytest.mark.parametrize("name", ["incr-decr", "token-list"])
def test_recipes_without_a_ttl_leak_permits(faulty: Rows, name: str) -> None:
    assert 0 < faulty[name]["leaked"] <= 3  # a process of three callers crashes
    assert faulty[name]["too_many"] == 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "interlock"])
def test_each_recipe_but_interlock_shows_its_own_flaw(faulty: Rows, name: str) -> None:
    assert faulty[name]["why"].startswith(SEMAPHORE_RECIPES[name].flaw.partition("{")[0])


def test_interlock_meets_the_same_faults_and_lets_five_in(faulty: Rows) -> None:
    row = faulty["interlock"]
    assert (row["calls"], row["too_many"], row["leaked"]) == (120, 0, 0)
    assert row["most"] <= 5
    assert "late request refused" in row["why"]
    assert "a crash waited out" in row["why"]


def test_interlock_is_exact_for_every_seed_limit_and_with_one_process() -> None:
    only = ["demo", "semaphore", "--json", "--only", "interlock", "--calls", "30"]
    demos = [start(*only, "--seed", "1", "--limit", "2")]
    demos.append(start(*only, "--seed", "2", "--limit", "1", "--processes", "1"))  # which crashes
    for demo in demos:
        row = rows(demo)["interlock"]
        assert (row["calls"], row["too_many"], row["leaked"]) == (30, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_without_faults_the_first_two_let_too_many_in_and_nothing_leaks(calm: Rows, name: str) -> None:
    assert calm[name]["calls"] == 20
    assert calm[name]["leaked"] == 0
    if name in NAMES[:2]:
        assert calm[name]["too_many"] > 0
    elif name not in {"one-set", "two-sets"}:  # which have a race without any fault
        assert calm[name]["too_many"] == 0


@pytest.mark.parametrize("name", ["incr-decr", "token-list"])
def test_after_the_only_permit_leaked_all_callers_give_up(name: str) -> None:
    row = rows(start("demo", "semaphore", "--json", "--only", name, "--limit", "1", "--calls", "15"))[name]
    assert row["leaked"] == 1
    assert row["calls"] < 15


def test_the_faults_of_a_seed_are_always_the_same_and_begin_with_a_crash() -> None:
    assert_plan_follows_its_seed(lambda seed: plan(120, 12, seed), 120)


# The command line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--calls", "0"], "--calls"),
        (["--limit", "0"], "--limit"),
        (["--limit", "five"], "--limit"),
        (["--callers", "-1"], "--callers"),
        (["--processes", "0"], "--processes"),
        (["--faults", "some"], "--faults"),
        (["--only", "set-del"], "one-set, two-sets"),
        (["--tickets", "40"], "--tickets"),
        (["again"], "again"),
        (["--url", "http://localhost"], "redis://"),
    ],
)
def test_bad_options_end_with_one_line_and_64(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line_and_64(["demo", "semaphore", *args], said, monkeypatch, capsys)


def test_options_before_the_subcommand_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--json", "semaphore"], monkeypatch) == 64
    assert "--json: put it after 'semaphore'" in capsys.readouterr().err


def test_help_lists_every_recipe_and_explains_the_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "semaphore", "--help"], monkeypatch) == 0
    out = capsys.readouterr().out
    for recipe in SEMAPHORE_RECIPES.values():
        assert f"{recipe.name:<13} {recipe.title}" in out
    assert all(word in out for word in ("five calls at a time", "--limit", "too many", "leaked", "Exit status"))


def test_the_users_server_stays_clean_and_a_bad_result_is_reported(
    embedded_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--only interlock --calls 5 --faults none"
    args = ["demo", "semaphore", "--url", embedded_server.url, *options.split()]
    connection = BareConnection(embedded_server.url)
    connection.execute("FLUSHALL")
    connection.execute("SET", "mine", "1")
    monkeypatch.setenv("COLUMNS", "200")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run(args, monkeypatch) == 0
        assert "never too many, in order" in capsys.readouterr().out
        monkeypatch.setattr(ApiLimit, "_count_free_permits", lambda _: 4)
        assert run(args, monkeypatch) == 1
        out = capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "calls too many: 0, leaked: 1, gave up: 0" in out
    assert "\x1b" not in out
    assert connection.execute("KEYS", "*") == [b"mine"]
    connection.close()
