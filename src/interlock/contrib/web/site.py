"""The answers of the page, the same for ASGI and WSGI: each face asks here once it knows who the visitor is.

Rules. (a) A visitor whom the host does not name gets 403 and no more. (b) Only a POST acts, and only if acting is on,
the request comes from this origin, and it has the token of the visitor's own cookie. (c) Nothing that somebody else
wrote gets into markup: the pages are fixed texts, and a script of ours puts text into them as text. (d) The policy of
each page forbids foreign and inline scripts and styles.
"""

from __future__ import annotations

import hashlib
import html
import inspect
import json
import re
import secrets
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from interlock._people.views import Name
from interlock._protocol.names import checked_name
from interlock._protocol.run_to_end import run
from interlock.contrib.web.acting import Wanted, revoke
from interlock.contrib.web.feed import AUDIT, HEALTH, NOW, PROCESSES, topic_of_lock
from interlock.errors import ConfigError, LockError
from interlock.primitives.codes import NEWER, OTHER, PLAIN
from interlock.primitives.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.contrib.web.feed import Feed

COOKIE: Final = "interlock-page"
MAX_BODY: Final = 100_000  # bytes
NO_ASYNC: Final = (
    "authorize and allow_revoke can't be async here: only interlock.contrib.web.app awaits them. Give plain functions"
)
MAX_OPENED: Final = 50  # names that viewers have open at a time
TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
TITLES: Final = {NOW: "Now", PROCESSES: "Processes", AUDIT: "Audit", HEALTH: "Health"}
PATHS: Final = {"/": NOW, "/processes": PROCESSES, "/audit": AUDIT, "/health": HEALTH}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Asked:
    """A request, below the place where the page is mounted."""

    method: str
    path: str
    root: str
    """Where the page is mounted: "" or "/locks"."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""
    origin: str
    """Of this site, as its visitor's browser names it: https://host."""
    cookies: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    person: str = ""
    """Whom the host has named."""
    may_revoke: bool = False


@dataclass
class Answer:
    """A reply. If it has a topic, it is a stream of the messages after a version."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    topic: str = ""
    version: str = ""


class Site:
    """The page of one feed."""

    def __init__(self, feed: Feed, *, streams: bool) -> None:
        """`streams`: whether the face can send a stream of events; else the page asks again and again."""
        self.feed, self.streams = feed, streams

    def answer(self, asked: Asked) -> Answer:
        """The answer to a visitor whom the host has named."""
        try:
            answer = self._answer(asked)
        except ConfigError as error:
            answer = _json(400, {"problem": str(error)})
        except LockError as error:
            answer = _json(503, {"problem": str(error)})
        answer.headers = HEADERS | answer.headers
        return answer

    def _answer(self, asked: Asked) -> Answer:
        if asked.path == "/revoke":
            return self._revoke(asked)
        if asked.method not in {"GET", "HEAD"}:
            return _text(405, "Only GET, and POST of a revocation", {"Allow": "GET, HEAD"})
        if asked.path == "/feed":
            return self._feed(asked)
        if asked.path.startswith("/static/"):
            return _static(asked)
        return self._view(asked)

    def _view(self, asked: Asked) -> Answer:
        if not asked.path:  # links below it would lead elsewhere
            return Answer(308, headers={"Location": f"{asked.root}/"})
        view = PATHS.get(asked.path)
        if view is not None:
            return self._page(asked, view, view, TITLES[view])
        if (name := _name_in(asked)) is not None:
            return self._page(asked, "lock", topic_of_lock(name), name.name)
        return _text(404, "There is no such page")

    def _feed(self, asked: Asked) -> Answer:
        if asked.headers.get("sec-fetch-site") in {"cross-site", "same-site"}:  # an <img> of theirs would open a name
            return _text(403, "the request comes from another site")
        topic, version = asked.query.get("topic", NOW), asked.query.get("v", "")
        if topic not in TITLES:
            topic = topic_of_lock(_checked_topic(topic))
            if topic not in self.feed.topics and len(self.feed.topics) >= MAX_OPENED:
                return _text(429, f"{MAX_OPENED} names are open already: close some")
        if self.streams and "text/event-stream" in asked.headers.get("accept", ""):
            version = asked.headers.get("last-event-id") or version
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
            return Answer(200, headers=headers, topic="" if asked.method == "HEAD" else topic, version=version)
        if asked.method == "HEAD":  # it counts as no viewer
            return Answer(200, headers={"Content-Type": "application/json"})
        messages = self.feed.poll(topic, version, timeout=0.0 if version else 3.0)
        return Answer(200, b"[" + b",".join(messages) + b"]", {"Content-Type": "application/json"})

    def _revoke(self, asked: Asked) -> Answer:
        if asked.method != "POST":
            return _text(405, "A revocation is a POST", {"Allow": "POST"})
        if not asked.may_revoke:
            return _json(403, {"problem": "this page only shows: it was started without the right to revoke"})
        if (problem := _foreign(asked)) is not None:
            return _json(403, {"problem": problem})
        if len(asked.body) > MAX_BODY:
            return _json(413, {"problem": "too long for a revocation"})
        wanted = Wanted.parse(asked.body)
        text = run(revoke(self.feed.locks()._session, wanted, asked.person))
        self.feed.hurry()
        return _json(200, {"text": text})

    def _page(self, asked: Asked, view: str, topic: str, title: str) -> Answer:
        cookie = asked.cookies.get(COOKIE, "")
        headers = {"Content-Type": "text/html; charset=utf-8"}
        if not re.fullmatch(r"[\w-]{40,}", cookie):
            cookie = secrets.token_urlsafe(32)
            secure = "; Secure" if asked.origin.startswith("https:") else ""
            headers["Set-Cookie"] = f"{COOKIE}={cookie}; Path={asked.root or '/'}; HttpOnly; SameSite=Strict{secure}"
        links = "".join(
            f'<li><a href="{html.escape(asked.root)}{path}"{" aria-current=page" if each == view else ""}>'
            f"{TITLES[each]}</a></li>"
            for path, each in PATHS.items()
        )
        text = _shell()
        for mark, value in (
            ("root", asked.root), ("view", view), ("topic", topic), ("title", title), ("token", csrf_of(cookie)),
            ("feed", "stream" if self.streams else "poll"), ("revoke", "yes" if asked.may_revoke else ""),
            ("person", asked.person),
        ):  # fmt: skip
            text = text.replace(f"{{{{{mark}}}}}", html.escape(_plain(value)))
        return Answer(200, text.replace("{{links}}", links).encode(errors="replace"), headers)


def csrf_of(cookie: str) -> str:
    """The token that a page has for this cookie. Only a page of this origin can read one of the two."""
    return hashlib.sha256(f"interlock page {cookie}".encode()).hexdigest()


def refused(text: str = "You are not logged in, or may not see the locks") -> Answer:
    """The answer to a visitor whom the host does not name."""
    answer = _text(403, text)
    answer.headers = HEADERS | answer.headers
    return answer


def person_of(said: object) -> str | None:
    """Whom `authorize` has named: "" for somebody without a name, None for nobody. Raises ConfigError.

    Whatever else it returns lets nobody in: many an object is true, such as a coroutine that nobody awaits, or the
    AnonymousUser of Django.
    """
    if said is True:
        return ""
    if said is None or said is False:
        return None
    if isinstance(said, str):
        return str(said) or None
    if inspect.iscoroutine(said):
        said.close()
        raise ConfigError(NO_ASYNC)
    raise ConfigError(
        f"authorize must return a str, True, False or None, not {type(said).__name__}: such as "
        "request.user.get_username(), if request.user may look"
    )


def checked(authorize: object, allow_revoke: object, *, is_async: bool) -> None:
    """Raise ConfigError if the host gives something else than the page can ask. `is_async`: whether they may be so."""
    if not callable(authorize):
        raise ConfigError(
            "authorize must be a callable that gets a request, and returns who may look or None; interlock.contrib.web"
            f".anybody lets everybody look. It is {authorize!r}"
        )
    if not (isinstance(allow_revoke, bool) or callable(allow_revoke)):
        raise ConfigError(f"allow_revoke must be True, False or a callable, not {type(allow_revoke).__name__}")
    if not is_async and (inspect.iscoroutinefunction(authorize) or inspect.iscoroutinefunction(allow_revoke)):
        raise ConfigError(NO_ASYNC)


def _foreign(asked: Asked) -> str | None:
    """What is wrong with the origin of a request that acts; None if nothing is."""
    site, origin = asked.headers.get("sec-fetch-site"), asked.headers.get("origin")
    if site is None and origin is None:
        return "the request does not say which site it comes from"
    if site not in {None, "same-origin"}:
        return "the request comes from another site"
    if origin is not None and urlsplit(origin).netloc != urlsplit(asked.origin).netloc:
        return "the request comes from another site"
    if not asked.headers.get("content-type", "").startswith("application/json"):
        return "the request is no JSON"
    cookie, token = asked.cookies.get(COOKIE, ""), asked.headers.get("x-interlock-token", "")
    if not cookie or not secrets.compare_digest(token.encode(), csrf_of(cookie).encode()):
        return "the request lacks the token of this page: load the page again"
    return None


def _name_in(asked: Asked) -> Name | None:
    """The name of which a path tells: /lock/<kind>/<name>, with the slashes of a name; or ?name=, for dots alone."""
    match = re.fullmatch(r"/lock/([^/]+)/(.*)", asked.path, re.DOTALL)
    name = "" if match is None else match[2] or asked.query.get("name", "")
    return _checked(Name(match[1], name, asked.query.get("prefix", "lock:"))) if match is not None and name else None


def _checked_topic(topic: str) -> Name:
    try:
        _, kind, name, prefix = json.loads(topic)
        if not all(isinstance(each, str) for each in (kind, name, prefix)):
            raise TypeError
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError("there is no such topic") from error
    return _checked(Name(kind, name, prefix))


def _checked(name: Name) -> Name:
    """Raise ConfigError for what no name can be."""
    if name.kind not in {*KINDS, PLAIN, OTHER, NEWER}:
        raise ConfigError(f"there is no kind {name.kind!r}: it is one of {', '.join(KINDS)}")
    checked_name(name.name)
    if name.prefix:
        checked_name(name.prefix, "prefix")
    return name


def _plain(value: str) -> str:
    return value.encode(errors="replace").decode()


def _json(status: int, value: object) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _text(status: int, text: str, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, text.encode(), {"Content-Type": "text/plain; charset=utf-8", **(headers or {})})


@cache
def _shell() -> str:
    return files("interlock.contrib.web").joinpath("static/page.html").read_text()


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """The static files by name, each with the tag of its content."""
    found = dict[str, tuple[bytes, str]]()
    for each in files("interlock.contrib.web").joinpath("static").iterdir():
        if any(each.name.endswith(ending) for ending in TYPES):
            content = each.read_bytes()
            found[each.name] = content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return found


def _static(asked: Asked) -> Answer:
    found = _files().get(asked.path.removeprefix("/static/"))
    if found is None:
        return _text(404, "There is no such file")
    content, tag = found
    headers = {"Content-Type": TYPES[asked.path[asked.path.rindex(".") :]] + "; charset=utf-8",
               "Cache-Control": "no-cache", "ETag": tag}  # fmt: skip
    if asked.headers.get("if-none-match") == tag:
        return Answer(304, headers=headers)
    return Answer(200, content, headers)
