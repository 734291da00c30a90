"""The page in a Flask app under gunicorn, behind the app's own login: no browser, but real requests to real workers."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from http.cookiejar import CookieJar

import pytest

from harness.commands import Command, python
from harness.modes import wait_until
from interlock import Interlock

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1")
SHOP = """
from flask import Flask, session
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from interlock import Interlock
from interlock.contrib import web

app = Flask(__name__)
app.secret_key = "of a test"
locks = Interlock({url!r}, label="shop")


@app.post("/login/<name>")
def login(name):
    session["user"] = name
    return name


def who(environ):
    with app.request_context(environ):
        return session.get("user") in ("ann", "eve") and session["user"]


page = web.wsgi_app(locks, authorize=who, allow_revoke=lambda environ: who(environ) == "ann")
app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {{"/locks": page}})
"""


class Visitor:
    """Somebody with a browser's cookies."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
        )

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        """The status and the text; a POST if there is a body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            with self.opener.open(urllib.request.Request(self.site + path, body, named), timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def sees(self, name: str) -> bool:
        """Whether the page, opened now, has this name."""
        status, text = self.ask("/locks/feed")
        assert status == 200, text
        return any(row["name"] == name for message in json.loads(text) for row in message["rows"])


@pytest.fixture(scope="module")
def site(locks_server, tmp_path_factory):
    """The address of the shop: two processes, each of which serves one request at a time."""
    folder = tmp_path_factory.mktemp("flask")
    (folder / "shop.py").write_text(SHOP.format(url=locks_server.url))
    words = python("-m", "gunicorn", "shop:app", "--bind", "127.0.0.1:0", "--workers", "2")
    command = Command(words, cwd=folder, log=folder / "log")
    command.says("Booting worker", times=2)
    yield command.says(r"http://127\.0\.0\.1:\d+")[0]
    status = command.end()
    command.kill_all()
    assert status == 0, command.output
    assert "Traceback" not in command.output


@pytest.fixture
def visitor(site):
    """`visitor(name)` has logged in by this name; `visitor()` has not."""

    def made(name=""):
        one = Visitor(site)
        if name:
            assert one.ask(f"/login/{name}", b"") == (200, name)
        return one

    return made


def test_strangers_see_nothing(visitor):
    for one in (visitor(), visitor("mallory")):
        for path in ("/locks/", "/locks/feed", "/locks/audit", "/locks/static/main.js"):
            status, text = one.ask(path)
            assert (status, text) == (403, "You are not logged in, or may not see the locks"), path


def test_who_is_logged_in_sees_what_is_held_now(visitor, locks_server):
    eve = visitor("eve")
    status, text = eve.ask("/locks/")
    assert status == 200
    assert 'data-feed="poll"' in text
    with Interlock(locks_server.url) as locks:
        with locks.lock("till"):
            wait_until(lambda: eve.sees("till"))
        wait_until(lambda: not eve.sees("till"))


def test_only_who_may_revokes_and_the_audit_has_the_name(visitor, site, locks_server):
    with Interlock(locks_server.url) as locks:
        lease = locks.lock("stuck").acquire()
        body = {"kind": "lock", "name": "stuck", "prefix": "lock:", "tokens": [lease.token], "reason": "stuck",
                "force": True}  # fmt: skip
        for name, status in (("mallory", 403), ("eve", 403), ("ann", 200)):
            one = visitor(name)
            token = re.search('data-token="(.*?)"', one.ask("/locks/")[1])
            answer = one.ask(
                "/locks/revoke", json.dumps(body).encode(), Origin=site, Sec_Fetch_Site="same-origin",
                Content_Type="application/json", X_Interlock_Token=token[1] if token else "",
            )  # fmt: skip
            assert answer[0] == status, answer
            holder = locks.lock("stuck").inspect().holder
            assert (holder is None) == (name == "ann")
        lease.release()
        ann = visitor("ann")
        wait_until(lambda: '"by":"ann' in ann.ask("/locks/feed?topic=audit")[1])
