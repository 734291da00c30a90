"""The live page without a browser and without a server: what its reader and its faces do."""

from __future__ import annotations

import io
import json
import os
import threading
from urllib.parse import quote

import pytest

from interlock import ConfigError, Interlock
from interlock._people.fleet import Look, Unread
from interlock._people.views import Name
from interlock.contrib import web
from interlock.contrib.web.feed import Feed
from interlock.contrib.web.site import person_of
from interlock.primitives.view import View

NOWHERE = "redis://127.0.0.1:1/0"  # nobody listens there


@pytest.fixture
def feed():
    made = Feed(NOWHERE, label="test")
    yield made
    made.close()
    assert made._thread is None or ends(made._thread)  # a thread that stays fails the tests behind this one


def look(*names, gone=()):
    """What a look has seen: that nobody holds these."""
    seen = {Name("lock", name, "lock:"): View(name, f"lock:{name}", "lock", "free", [], 0, [], 0) for name in names}
    return Look(1.0, seen, [Name("lock", name, "lock:") for name in gone], [], [], 1.0, Unread(), len(names), 0.0, 0.0)


def test_a_row_of_another_process_has_another_number(feed):
    other = Feed(NOWHERE, label="test")
    for each in (feed, other):
        each._note(look("stock"))
    assert feed._rows.keys().isdisjoint(other._rows)
    assert all(number < 2**53 for number in feed._rows)


@pytest.fixture
def locks():
    with Interlock(NOWHERE, registry=False) as made:
        yield made


def get(app, path, query="", **environ):
    """The status, the text and the headers of what a WSGI page answers."""
    said = []
    asked = {
        "REQUEST_METHOD": "GET", "PATH_INFO": path, "SCRIPT_NAME": "", "QUERY_STRING": query, "HTTP_HOST": "locks.test",
        "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), **environ,
    }  # fmt: skip
    body = b"".join(app(asked, lambda status, headers: said.append((int(status[:3]), dict(headers)))))
    return said[0][0], body.decode(), said[0][1]


class Anonymous:
    """Somebody of a framework who is not logged in, and is true."""


async def who(_request):
    """Name nobody: a page that does not await this has a coroutine, which is true."""


def test_a_page_lets_nobody_in_whom_it_can_not_name(locks):
    assert (person_of("ann"), person_of(True), person_of("")) == ("ann", "", None)
    assert person_of(None) is person_of(False) is None
    for said in (Anonymous(), 1, object, ["ann"], b"ann"):
        with pytest.raises(ConfigError, match=f"True, False or None, not {type(said).__name__}"):
            person_of(said)
    with pytest.raises(ConfigError, match="async"):  # and the coroutine is closed: nothing warns of it
        person_of(who(None))
    for said in (Anonymous(), who(None)):
        with pytest.raises(ConfigError):
            get(web.wsgi_app(locks, authorize=lambda _environ, said=said: said), "/")
    assert get(web.wsgi_app(locks, authorize=lambda _environ: None), "/")[0] == 403


def test_a_page_refuses_functions_that_it_would_not_await(locks):
    for given in ({"authorize": who}, {"authorize": web.anybody, "allow_revoke": who}):
        with pytest.raises(ConfigError, match="async"):
            web.wsgi_app(locks, **given)
    with pytest.raises(ConfigError, match="not str"):
        web.wsgi_app(locks, authorize=web.anybody, allow_revoke="no")


def test_only_true_lets_somebody_revoke(locks):
    for may, shown in ((Anonymous(), ""), (1, ""), ("no", ""), (True, "yes")):
        app = web.wsgi_app(locks, authorize=web.anybody, allow_revoke=lambda _environ, may=may: may)
        assert f'data-revoke="{shown}"' in get(app, "/")[1]


@pytest.fixture
def page(locks):
    """A page that everybody may see. Its reader ends with the test."""
    app = web.wsgi_app(locks, authorize=web.anybody)
    yield app
    app.feed.close()
    assert app.feed._thread is None or ends(app.feed._thread)


@pytest.mark.parametrize(
    ("name", "prefix"), [("\ud800", "lock:"), ("a\nb", "lock:"), ("", "lock:"), ("é" * 257, "lock:"), ("a", "\udfff:")]
)
def test_what_no_name_can_be_is_no_topic(page, name, prefix):
    """Else one visitor could put a row into everybody's page that no browser can show."""
    status, text, _ = get(page, "/feed", f"topic={quote(json.dumps(['lock', 'lock', name, prefix]))}")
    assert status == 400
    assert ("prefix" if name == "a" else "name") in json.loads(text)["problem"]
    assert not page.feed.topics


def test_another_site_opens_no_topic(page):
    """An <img> on any page could, of a page that needs no cookie."""
    for site in ("cross-site", "same-site"):
        assert get(page, "/feed", HTTP_SEC_FETCH_SITE=site)[0] == 403
    assert not page.feed.topics
    for site in ("same-origin", "none"):
        assert get(page, "/feed", HTTP_SEC_FETCH_SITE=site)[0] == 200
    assert [*page.feed.topics] == ["now"]


def ends(*threads):
    """Whether these have ended."""
    for each in threads:
        each.join(30)
    return not any(each.is_alive() for each in threads)


def test_a_viewer_of_what_is_watched_hurries_nobody(feed, monkeypatch):
    """Else each question of each viewer would be a look."""
    over = threading.Event()
    monkeypatch.setattr(feed, "_run", over.wait)  # a reader that does nothing
    feed.poll("now", "")
    assert feed._wake.is_set()
    feed._wake.clear()
    for _ in range(3):
        feed.poll("now", "")
        feed.listen("now", print)
    assert not feed._wake.is_set()
    feed.poll("processes", "")
    assert feed._wake.is_set()
    over.set()
    assert ends(feed._thread)


def test_a_reader_that_has_died_is_replaced_and_no_viewer_believes_its_versions(feed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(feed, "_run", lambda: None)
        feed.poll("now", "")
        dead = feed._thread
        assert ends(dead)
    feed._note(look("stock"))
    epoch = feed._epoch
    feed.poll("now", "")
    assert feed._thread is not dead
    assert feed._thread.is_alive()
    assert feed._epoch != epoch
    assert not feed._rows


def test_a_child_of_a_fork_has_a_reader_of_its_own(feed):
    feed.poll("now", "")
    with feed._mutex:  # as another thread may, in the moment of a fork
        child = os.fork()
        if not child:
            free = []
            taker = threading.Thread(target=lambda: free.append(feed._mutex.acquire(timeout=5)))
            taker.start()
            taker.join()
            os._exit(0 if free == [True] and feed._thread is None and not feed.topics else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_listener_that_raises_is_dropped_and_the_others_hear(feed):
    heard = []

    def gone():
        raise RuntimeError("Event loop is closed")

    feed._note(look("stock"))
    feed._topic("now").listeners |= {gone, lambda: heard.append(1)}
    feed._publish()
    feed._publish()
    assert heard == [1, 1]
    assert gone not in feed.topics["now"].listeners


def test_a_page_serves_again_after_its_end(feed):
    feed.poll("now", "")
    first = feed._thread
    feed.close()
    assert ends(first)
    feed.open()
    feed.poll("now", "")
    assert feed._thread is not None


def test_a_row_that_is_gone_is_gone_even_if_the_rest_of_its_look_fails(feed, monkeypatch):
    feed._note(look("stock"))
    (number,) = feed._rows
    with monkeypatch.context() as patch:
        patch.setattr(feed, "_details", lambda _opened: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            feed._note(look(gone=["stock"]))
    feed._note(look())
    assert not feed._rows
    assert feed.topics["now"].change["gone"] == [number]


def test_a_name_about_which_a_look_fails_leaves_the_others(feed, monkeypatch):
    def details(name):
        return {"row": 1 // (name.name != "bad")}

    monkeypatch.setattr(feed, "_details_of", details)
    found = feed._details([Name("lock", "bad", "lock:"), Name("lock", "good", "lock:")])
    assert [*found.values()] == [{"problem": "integer division or modulo by zero"}, {"row": 1}]
