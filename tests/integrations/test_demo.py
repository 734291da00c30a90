"""The flash sale, `interlock demo`: its rows, its faults, how it ends. No timing decides a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from harness.demos import Rows, assert_one_line_and_64, assert_plan_follows_its_seed, finish, rows, run, start
from interlock.cli.demo.connection import BareConnection
from interlock.cli.demo.flash_sale import plan
from interlock.cli.demo.lock_recipes import LOCK_RECIPES

if TYPE_CHECKING:
    from interlock.embedded import Server

pytestmark = [
    pytest.mark.runs_on("its own servers", starts="an embedded server"),
    pytest.mark.xdist_group("demo"),  # they share a run of 20 s
]
NAMES = list(LOCK_RECIPES)
FAULTY = "--json --tickets 24 --seed 3"
CALM = "sale --json --tickets 6 --faults none --processes 3 --buyers 2"


def test_rows_have_the_promised_shape(faulty: Rows) -> None:
    assert list(faulty) == NAMES
    for row in faulty.values():
        assert list(row) == ["name", "sold", "oversold", "lost_sales", "seconds", "why"]
        assert row["oversold"] == max(0, row["sold"] - 24)
        assert row["lost_sales"] == max(0, 24 - row["sold"])
        assert row["seconds"] > 0
        assert row["why"]


@pytest.mark.parametrize("name", ["no-lock", "process-lock", "set-del", "get-del", "no-finally", "early-return", "lua"])
def test_recipes_without_exclusion_oversell(faulty: Rows, name: str) -> None:
    assert faulty[name]["oversold"] > 0


@pytest.mark.parametrize("name", ["setnx", "setnx-expire", "ttl-repair", "bytes-str"])
def test_recipes_that_hang_lose_sales(faulty: Rows, name: str) -> None:
    assert faulty[name]["lost_sales"] > 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "interlock"])
def test_each_recipe_but_interlock_shows_its_own_flaw(faulty: Rows, name: str) -> None:
    assert faulty[name]["why"].startswith(LOCK_RECIPES[name].flaw.partition("{")[0])


def test_interlock_meets_the_same_faults_and_sells_exactly_all(faulty: Rows) -> None:
    row = faulty["interlock"]
    assert (row["sold"], row["oversold"], row["lost_sales"]) == (24, 0, 0)
    assert "late write refused" in row["why"]
    assert "a crash waited out" in row["why"]


def test_interlock_is_exact_for_every_seed_and_with_one_process() -> None:
    only = ["demo", "--json", "--only", "interlock", "--tickets", "12"]
    demos = [start(*only, "--seed", "1", "--processes", "2")]
    demos.append(start(*only, "--seed", "2", "--processes", "1", "--buyers", "2"))  # which crashes
    for demo in demos:
        assert rows(demo)["interlock"]["sold"] == 12


@pytest.mark.parametrize("name", NAMES)
def test_without_faults_all_but_the_first_two_sell_exactly_all(calm: Rows, name: str) -> None:
    if name in NAMES[:2]:
        assert calm[name]["oversold"] > 0
    else:
        assert calm[name]["sold"] == 6


def test_the_faults_of_a_seed_are_always_the_same_and_begin_with_a_crash() -> None:
    assert_plan_follows_its_seed(lambda seed: plan(40, seed), 40)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo", "--tickets", "0"], "--tickets"),
        (["demo", "--tickets", "many"], "--tickets"),
        (["demo", "--buyers", "-1"], "--buyers"),
        (["demo", "--processes", "0"], "--processes"),
        (["demo", "--faults", "some"], "--faults"),
        (["demo", "--only", "redlock"], "set-del, get-del"),
        (["demo", "--only", ""], "set-del, get-del"),
        (["demo", "--colour"], "--colour"),
        (["demo", "again"], "again"),
        (["demo", "--seed", "3", "sale"], "--seed: put it after 'sale'"),
        (["demo", "sale", "--calls", "3"], "--calls"),
        (["demo", "--url", "http://localhost"], "redis://"),
        (["sell"], "sell"),
        (["server", "restart"], "restart"),
    ],
)
def test_bad_options_end_with_one_line_and_64(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line_and_64(args, said, monkeypatch, capsys)


def test_a_server_out_of_reach_is_one_line_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--url", "redis://:sesame@localhost:1/0"], monkeypatch) == 69
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "localhost:1" in err
    assert "sesame" not in err


def test_the_table_is_plain_without_a_terminal_and_the_users_server_stays_clean(embedded_server: Server) -> None:
    connection = BareConnection(embedded_server.url)
    connection.execute("SET", "mine", "1")
    status, out, err = finish(
        start("demo", "--url", embedded_server.url, "--only", "setnx,interlock", "--tickets", "8")
    )
    assert err == ""
    assert status == 0
    assert "\x1b" not in out
    assert "SETNX" in out
    assert connection.execute("KEYS", "*") == [b"mine"]
    connection.close()


@pytest.mark.parametrize("recipes", ["--only setnx", "semaphore --only incr-decr"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes_and_leaves_nothing_in_the_users_server(
    number: int, recipes: str, embedded_server: Server
) -> None:
    connection = BareConnection(embedded_server.url)
    connection.execute("FLUSHALL")
    with start("demo", *recipes.split(), "--url", embedded_server.url) as demo:
        while not connection.execute("KEYS", "*:lock"):
            time.sleep(0.01)
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(demo.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        demo.send_signal(number)
        assert demo.wait(60) == 130
        assert demo.stderr is not None
        assert demo.stderr.read() == ""
    assert children  # one of them may just have crashed, as planned
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)
    assert connection.execute("KEYS", "*") == []
    connection.close()


def test_without_typer_one_line_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['typer'] = None; from interlock.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 69
    assert done.stderr == (
        "interlock: the command line needs typer and rich: "
        "pip install typer rich, or '.[cli]' in a checkout of interlock\n"
    )


def test_the_command_line_prints_help_and_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, said in (
        ([], ["demo"]),
        (["--version"], ["interlock 0"]),
        (["demo", "--help"], [*NAMES, "--tickets", "semaphore"]),
        (["demo", "sale", "-h"], [*NAMES, "--tickets"]),
        (["server"], ["status"]),
    ):
        assert run(args, monkeypatch) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in said)
