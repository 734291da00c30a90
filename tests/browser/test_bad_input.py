"""What the page says when something is not as it should be, while the rest goes on."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from interlock import Interlock
from interlock._protocol.tokens import Process
from interlock.primitives.registry import ReportCall
from interlock.testing import BreakableServer

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1")


@pytest.fixture
def own():
    """A server of this test alone."""
    with BreakableServer() as made:
        yield made


def test_a_server_that_refuses_the_registry_is_a_line_and_the_rest_goes_on(serve, browser, own):
    with redis.Redis.from_url(own.url) as client, Interlock(own.url, label="shop") as locks:
        keys = ("~lock:*", "~{lock:*", "~{interlock:audit}*")  # and not those of the registry
        client.execute_command("ACL", "SETUSER", "blind", "on", ">secret-of-blind", *keys, "+@all", "&*")
        with locks.lock("known"):
            url = own.url.replace("unix://", "unix://blind:secret-of-blind@")
            address, _ = serve(url)
            browser.open(address)
            browser.sees("does not show what processes hold", "interlock doctor", "Live")
            browser.open(f"{address}lock/lock/known")
            browser.sees("does not show what processes hold", "Its lease ends at", "shop@")
            browser.open(f"{address}audit")
            browser.sees("Nobody has revoked anything")
            assert "secret-of-blind" not in browser.run("return document.documentElement.outerHTML")


def test_entries_of_another_version_are_counted(serve, browser, own):
    with Interlock(own.url, label="shop") as locks, locks.lock("known"):
        entry = json.dumps({"v": 99, "library": "9.0", "holds": [], "waits": []})
        call = ReportCall(str(Process("new", "host", 1)), "session", "60000", entry)
        script, keys, args = call.message
        with redis.Redis.from_url(own.url) as client:
            client.eval(script.source, len(keys), *keys, *args)
        address, _ = serve(own.url)
        browser.open(address)
        browser.sees("1 entry of processes can't be read", "another version", "known", "Live")


def test_a_page_whose_device_has_a_wrong_clock_says_so(serve, browser, own):
    with Interlock(own.url, label="shop") as locks, locks.lock("known"):
        address, _ = serve(own.url)
        planted = browser.command(
            "Page.addScriptToEvaluateOnNewDocument",
            source="const now = Date.now; Date.now = () => now() + 3600_000",
        )
        try:
            browser.open(address)
            browser.sees("This device's clock is 1 h ahead", "known")
            assert re.search(r"\s\d+(\.\d)? s\s", browser.row("known"))  # the age of its lease, which is right
        finally:
            browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=planted["identifier"])


def test_nobody_looking_costs_nothing_and_ten_viewers_cost_what_one_costs(serve, browser, own):
    """Counted in commands of the server."""
    with redis.Redis.from_url(own.url) as client, Interlock(own.url, label="shop") as locks, locks.lock("known"):
        address, _ = serve(own.url)

        def calls(seconds):
            """Reads of what processes hold, in a time."""
            text = client.info("commandstats")
            before = sum(text.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
            time.sleep(seconds)
            text = client.info("commandstats")
            return sum(text.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval")) - before

        unwatched = calls(3)
        browser.open(address)
        browser.sees("known")
        one = calls(6)
        first = browser.driver.current_window_handle
        windows = []
        for _ in range(5):  # a browser has six connections to one origin, in all its windows
            browser.driver.switch_to.new_window("tab")
            windows.append(browser.driver.current_window_handle)
            browser.open(address.replace("127.0.0.1", "localhost"))
            browser.sees("known")
        ten = calls(6)
        for window in windows:
            browser.driver.switch_to.window(window)
            browser.driver.close()
        browser.driver.switch_to.window(first)
        assert unwatched * 2 < one, (unwatched, one)  # in as many seconds: only the shop's own renewals and reports
        assert ten <= 2 * one, (one, ten)


def test_a_page_that_others_may_reach_wants_a_token(own, tmp_path):
    import os
    import subprocess
    import sys

    interlock = str(Path(sys.executable).with_name("interlock"))

    def run(*words, **environment):
        return subprocess.run([interlock, "web", "--url", own.url, *words], capture_output=True, text=True, check=False,
                              timeout=60, env={**os.environ, **environment})  # fmt: skip

    refused = run("--host", "0.0.0.0")
    assert refused.returncode == 64
    assert "token" in refused.stderr and len(refused.stderr.splitlines()) == 1
    short = run("--host", "0.0.0.0", INTERLOCK_WEB_TOKEN="short")
    assert short.returncode == 64
    assert "16 characters" in short.stderr
    away = run("--token-file", str(tmp_path / "none"))
    assert away.returncode == 64
    assert "No such file" in away.stderr


def test_a_page_that_another_process_answers_shows_no_row_of_the_one_before(serve, browser, own):
    with (
        Interlock(own.url) as locks, BreakableServer() as other, Interlock(other.url) as others,
        locks.lock("before"), others.semaphore("later", 2),
    ):  # fmt: skip
        address, command = serve(own.url)
        browser.open(address)
        browser.sees("before", "Live")
        command.kill_all()
        serve(other.url, "--port", str(urlsplit(address).port))
        browser.sees("later", "Live")
        browser.sees_no("before")
        (link,) = browser.run("return [...document.querySelectorAll('tbody .name')].map((each) => each.href)")
        assert link.endswith("/lock/semaphore/later")
        assert browser.run("return document.querySelector('tbody .kind').textContent") == "semaphore"


def planted(browser, change):
    """Let the scripts of the next pages read each message of the page's process with this change to it."""
    source = f"const real = JSON.parse; JSON.parse = (text) => {{ const made = real(text); {change}; return made; }}"
    return browser.command("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("for (const row of made.rows ?? []) if (row.name === 'bad') row.name = '\\ud800'", ("\\ud800", "Live")),
        (
            "for (const row of made.rows ?? []) if (row.name === 'bad') Object.assign(row, {waiting: 1, oldest: 1e30})",
            ("bad can't be shown", "Live"),
        ),
        ("made.deadlocks = [{}]", ("This page has failed",)),
    ],
    ids=["half a surrogate pair", "a row that can't be made", "a message that can't be shown"],
)
def test_what_can_not_be_shown_harms_no_other_row_and_is_not_called_live(serve, browser, own, change, words):
    with Interlock(own.url, label="shop") as locks, locks.lock("good"), locks.lock("bad"):
        address, _ = serve(own.url)
        identifier = planted(browser, change)
        try:
            browser.open(address)
            text = browser.sees("good", *words) if len(words) > 1 else browser.sees(*words)
            assert ("Live" in text) == ("Live" in words)
        finally:
            browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=identifier)
