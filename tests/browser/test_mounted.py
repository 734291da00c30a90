"""The page mounted in a program: whom it lets in, and how its answers end. No browser is needed for that."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from interlock import ConfigError, Interlock
from interlock.contrib import web
from interlock.contrib.web import streams

if TYPE_CHECKING:
    from interlock.contrib.web.asgi import AsgiPage

NOWHERE = "redis://127.0.0.1:1/0"  # nobody listens there


@pytest.fixture
def locks():
    with Interlock(NOWHERE, registry=False) as made:
        yield made


def get(app: AsgiPage, path: str, query: str = "", *, method: str = "GET", **headers: str):
    """The status, the headers and the body of what an ASGI page answers, once it has ended."""
    sent = []
    gone = asyncio.Event()
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path, "root_path": "",
        "query_string": query.encode(), "server": ("locks.test", 80), "client": ("127.0.0.1", 5),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip

    requests = iter([b""])

    async def receive():
        if next(requests, None) is None:
            await gone.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    body = b"".join(each.get("body", b"") for each in sent[1:])
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, body


class Anonymous:
    """Somebody of a framework who is not logged in, and is true."""


def test_an_asgi_page_lets_nobody_in_whom_it_can_not_name(locks):
    async def nobody(_request):
        return Anonymous()

    async def ann(_request):
        return "ann"

    for authorize in (nobody, lambda _request: Anonymous()):
        with pytest.raises(ConfigError, match="not Anonymous"):
            get(web.app(locks, authorize=authorize), "/")
    assert get(web.app(locks, authorize=lambda _request: ""), "/")[0] == 403
    assert get(web.app(locks, authorize=ann), "/")[0] == 200


def test_urls_of_django_let_nobody_in_whom_they_can_not_name():
    script = f"""
import django
from django.conf import settings
settings.configure(ALLOWED_HOSTS=["*"], INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes"])
django.setup()
from django.contrib.auth.models import AnonymousUser
from django.test import RequestFactory
from interlock import ConfigError, Interlock
from interlock.contrib.web.django import urls

async def who(request):
    return "ann"

def refuses(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("it let somebody in")

request = RequestFactory().get("/")
with Interlock({NOWHERE!r}, registry=False) as locks:
    assert "async" in refuses(lambda: urls(locks, authorize=who))
    for said in (AnonymousUser(), who(request)):
        (pattern,) = urls(locks, authorize=lambda request: said)
        refuses(lambda: pattern.callback(request, path=""))
    for said, status in ((None, 403), (False, 403), ("", 403), ("ann", 200)):
        (pattern,) = urls(locks, authorize=lambda request: said)
        assert pattern.callback(request, path="").status_code == status
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_a_stream_ends_by_itself_and_the_next_one_goes_on(locks_server, monkeypatch):
    """So the host is asked again who looks, and a server that shuts down need not wait for ever."""
    monkeypatch.setattr(streams, "LASTS", (3.0, 4.0))
    asked, locks = [], Interlock(locks_server.url, registry=False)
    app = web.app(locks, authorize=lambda request: not asked.append(request))
    first = get(app, "/feed", accept="text/event-stream")
    assert first[0] == 200
    assert first[1]["content-type"].startswith("text/event-stream")
    versions = re.findall(rb"id: (\S+)\n", first[2])
    assert versions
    second = get(app, "/feed", accept="text/event-stream", last_event_id=versions[-1].decode())
    assert b'"full":true' in first[2]
    assert b'"full":true' not in second[2]
    assert re.findall(rb"id: (\S+)\n", second[2])
    assert len(asked) == 2
    app.feed.close()
    locks.close()


def test_head_starts_no_stream_and_is_no_viewer(locks):
    app = web.app(locks, authorize=web.anybody)
    for accept, kind in (("text/event-stream", "text/event-stream"), ("*/*", "application/json")):
        status, headers, body = get(app, "/feed", method="HEAD", accept=accept)
        assert (status, headers["content-type"].split(";")[0], body) == (200, kind, b"")
    assert not app.feed.topics
