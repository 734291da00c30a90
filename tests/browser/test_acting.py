"""Revoking from the page: by whoever may, as a person does it; and by nobody else."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from harness.modes import wait_until
from interlock import Interlock, LeaseLost
from interlock._people.revocation import audit
from interlock._protocol.run_to_end import run

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1")
TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def acting(serve, locks_server):
    """The address of a page that revokes, with its token."""
    return serve(locks_server.url, "--allow-revoke", INTERLOCK_WEB_TOKEN=TOKEN)[0]


@pytest.fixture
def locks(locks_server):
    with Interlock(locks_server.url, label="shop") as made:
        yield made


def revocations(locks, name):
    return run(audit(locks._session.core, name))


def asked(address, method, path, body=None, **headers):
    """The status, the text and the headers of a plain request."""
    target = urlsplit(address)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=30)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text, dict(reply.getheaders())


def test_a_person_asks_a_holder_to_give_it_back_and_takes_it(acting, browser, locks):
    browser.open(f"{acting}?token={TOKEN}")
    browser.sees("Live")
    assert TOKEN not in browser.driver.current_url
    lease = locks.lock("import").acquire()
    browser.open(f"{acting}lock/lock/import")
    browser.sees("Ask to give it back")
    browser.click("Ask to give it back")
    browser.sees("is asked to give it back", "can renew its lease no more")
    browser.run("document.querySelector('#reason').value = 'the import hangs'")
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    browser.sees("Its holder was asked to give it back")
    wait_until(lambda: lease.lost)
    (found,) = revocations(locks, "import")
    assert (found.reason, found.forced, found.result) == ("the import hangs", False, "revoked")
    with pytest.raises(LeaseLost, match="the import hangs"):
        lease.ensure()
    browser.click("Close")
    browser.sees("since it was revoked")
    browser.click("Take it")
    browser.sees("may still be at work")
    browser.run("document.querySelector('#reason').value = 'it is dead'")
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    browser.sees("It was taken")
    assert locks.lock("import").inspect().holder is None
    browser.open(f"{acting}audit")
    browser.sees("it is dead", "the import hangs", "by force")
    assert not browser.log()
    lease.release()


def test_a_latch_is_broken_and_its_waiters_know(acting, browser, program, locks_server):
    waiter = program(
        locks_server.url,
        "def work():\n    try:\n        locks.latch('warm', 3).wait()\n    except LockError as error:\n"
        "        print('broken:', error, flush=True)\nthreading.Thread(target=work).start()",
    )
    browser.open(f"{acting}?token={TOKEN}")
    browser.open(f"{acting}lock/latch/warm")
    browser.sees("3 of 3 left", "Break it")
    browser.click("Break it")
    browser.run("document.querySelector('#reason').value = 'not today'")
    browser.run("document.querySelector('dialog button[type=submit]').click()")
    browser.sees("It is broken")
    waiter.says("broken: .*not today")


def test_a_request_that_is_not_this_pages_does_nothing(acting, locks):
    lease = locks.lock("safe").acquire()
    address = urlsplit(acting)
    status, _, headers = asked(acting, "GET", f"/?token={TOKEN}")
    assert status == 303
    cookie = headers["set-cookie"].split(";")[0]
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]
    status, text, headers = asked(acting, "GET", "/", Cookie=cookie)
    assert status == 200
    assert "unsafe-inline" not in headers["content-security-policy"]
    page = headers["set-cookie"].split(";")[0]
    token = text.split('data-token="')[1].split('"')[0]
    body = json.dumps({"kind": "lock", "name": "safe", "prefix": "lock:", "tokens": [lease.token], "reason": "x",
                       "force": True})  # fmt: skip
    good = {
        "Cookie": f"{cookie}; {page}", "Origin": f"http://{address.netloc}", "Sec_Fetch_Site": "same-origin",
        "Content_Type": "application/json", "X_Interlock_Token": token,
    }  # fmt: skip
    wrong = [
        {"Cookie": page},  # nobody
        {"Cookie": cookie},  # no cookie of the page
        {"Cookie": f"{cookie}; interlock-page={'x' * 43}"},  # a cookie that somebody planted
        {"X_Interlock_Token": "0" * 64},
        {"X_Interlock_Token": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
    ]
    for each in wrong:
        status, text, _ = asked(acting, "POST", "/revoke", body, **(good | each))
        assert status == 403, (each, text)
    missing = {name: value for name, value in good.items() if name not in {"Origin", "Sec_Fetch_Site"}}
    assert asked(acting, "POST", "/revoke", body, **missing)[0] == 403
    assert asked(acting, "GET", "/revoke", **good)[0] == 405
    for bad in (b"", b"{}", b"[" * 100_000, b"\xff", body.replace('"lock"', '"nonsense"'), body.replace('"x"', '" "')):
        status, text, _ = asked(acting, "POST", "/revoke", bad, **good)
        assert status in {400, 413}, text
    assert asked(acting, "POST", "/revoke", body.replace(lease.token, "somebody else"), **good)[1].count("gone before")
    assert lease.state.name == "HELD"
    assert not revocations(locks, "safe")
    assert asked(acting, "POST", "/revoke", body, **good)[0] == 200  # and so is the right one
    assert locks.lock("safe").inspect().holder is None
    lease.release()


@pytest.mark.parametrize("path", ["/", "/?token=nonsense", "/feed", "/lock/lock/x", "/static/main.js", "/audit"])
def test_without_the_token_nothing_is_shown(acting, path):
    status, text, _ = asked(acting, "GET", path, Cookie="interlock-token=nonsense")
    assert status == 403
    assert "needs its token" in text


def test_a_page_that_only_shows_revokes_nothing_and_answers_this_machine_alone(page, browser, locks):
    with locks.lock("kept") as lease:
        browser.open(f"{page}lock/lock/kept")
        browser.sees("Its lease ends at")
        assert "Take it" not in browser.text
        status, text, _ = asked(page, "POST", "/revoke", "{}", Origin=page.rstrip("/"))
        assert (status, "only shows" in text) == (403, True)
        assert asked(page, "GET", "/", Host="evil.example")[0] == 421  # a foreign name that leads here
        assert asked(page, "DELETE", "/")[0] == 405
        assert asked(page, "GET", "/nothing")[0] == 404
        assert asked(page, "GET", "/lock/nonsense/x")[0] == 400
        assert asked(page, "GET", "/static/../site.py")[0] == 404
        lease.ensure()
