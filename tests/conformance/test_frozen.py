"""What every version must find as it is: keys, stored texts and pushes, compared with docs/internals/stored.md."""

from __future__ import annotations

import re
import threading

import pytest

from harness.matrix import ROOT
from harness.modes import wait_until
from interlock import Interlock
from interlock.compat import redis_py

pytestmark = pytest.mark.runs_on("valkey-9.1", modes="threads")
PAGE = (ROOT / "docs/internals/stored.md").read_text()
KEYS = set(re.findall(r"^\| `([^`]*x[^`]*)` \| (string|hash|zset) \|", PAGE, re.MULTILINE))
(BLOCK,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
TEXTS: dict[str, list[str]] = {}
for line in BLOCK.splitlines():
    what, words = re.split(r"  +", line)
    words = re.sub("<[^>]*>", r"\\S+", words) + r"( [^!\s]\S*)*( !.*)?"  # and words of a later version, and a reason
    TEXTS.setdefault(what.partition(" ")[0], []).append(words)


def matches(what: str, text: bytes) -> bool:
    return any(re.fullmatch(each, text.decode()) for each in TEXTS[what])


@pytest.fixture
def pushed(clean):
    """A function: how many pushes began with these words. Each push until now must be as the page says."""
    listening = clean.pubsub()
    listening.psubscribe("interlock:*")
    assert listening.get_message(timeout=20)["type"] == "psubscribe"

    def count(beginning: bytes) -> int:
        clean.publish("interlock:end", "end")
        texts = [*iter(lambda: listening.get_message(timeout=20)["data"], b"end")]
        assert all(matches("push", text) for text in texts if text), texts
        return sum(text.startswith(beginning) for text in texts)

    yield count
    listening.close()


def uses(kind: str, locks: Interlock) -> tuple:
    """A call that takes what there is of the kind, and gives what ends that; and a call that then has to wait."""
    if kind == "latch":
        latch = locks.latch("x", 2)
        return lambda: latch.count_down() and latch.count_down, lambda: latch.wait(20)
    if kind == "barrier":
        barrier = locks.barrier("x", 2)
        return lambda: lambda: barrier.wait(20), lambda: barrier.wait(20)
    if kind == "election":
        election = locks.election("x")
        return lambda: election.campaign().resign, lambda: election.campaign(timeout=20).resign()
    if kind == "rwlock":
        rwlock = locks.rwlock("x")
        return lambda: rwlock.write().acquire().release, lambda: rwlock.read().acquire(timeout=20).release()
    made = locks.semaphore("x", 1) if kind == "semaphore" else locks.lock("x")
    return lambda: made.acquire().release, lambda: made.acquire(timeout=20).release()


@pytest.mark.parametrize("kind", ["lock", "semaphore", "rwlock", "election", "latch", "barrier"])
def test_keys_texts_and_pushes_are_those_of_the_page(server, clean, pushed, kind):
    with Interlock(server.url) as locks, Interlock(server.url) as others:
        end = uses(kind, locks)[0]()
        waiting = threading.Thread(target=uses(kind, others)[1])
        waiting.start()
        wait_until(lambda: clean.hlen("{lock:x}{waiters}") == 1)
        check_keys(clean)
        end()
        waiting.join(20)
        check_keys(clean)
    assert pushed(b"granted ") >= 1


def test_a_revocation_and_a_note_are_as_the_page_says(server, clean, pushed):
    with Interlock(server.url) as locks:
        for made in (locks.lock("x"), locks.semaphore("x", 1)):
            clean.flushall()
            lease = made.acquire()
            assert made.revoke("for maintenance of the page", force=False)
            check_keys(clean)
            wait_until(lambda lease=lease: lease.lost.is_set())
        clean.flushall()
        assert locks.once("x", at_most=10, at_least=10).run(lambda _lease: None)
        check_keys(clean, "{lock:x}{done}")
    assert pushed(b"revoked ") == 2


def test_a_drop_in_stores_what_the_page_says(server, clean, pushed, request):
    request.addfinalizer(redis_py.close)  # the drop-ins of a process share one Interlock, whose threads would go on
    held, waiting = (redis_py.Lock(clean, "x", timeout=10) for _ in range(2))
    assert held.acquire()
    waiter = threading.Thread(target=waiting.acquire)
    waiter.start()
    wait_until(lambda: clean.hlen("{x}{plain-waiters}") == 1)
    check_keys(clean, "{x}{plain-record}")
    held.release()
    waiter.join(20)
    check_keys(clean, "{x}{plain-record}")
    clean.delete("x")
    assert pushed(b"granted ") >= 1


def test_the_page_names_what_there_is():
    assert len(KEYS) == 11 + 5
    assert {*TEXTS} == {"record", "waiter", "share", "note", "push"}
    assert matches("waiter", b"1 3000 1 interlock:x lock @7")
    assert matches("push", b"revoked token !why it was")
    assert not matches("waiter", b"1 3000 1")
    assert not matches("push", b"gone token")
    assert not matches("record", b"2 lock 7 - 30000 - - -")


def check_keys(client, wanted: str = "{lock:x}{record}") -> None:
    """The keys and their types; each text must be as the page says."""
    keys = [key for key in client.scan_iter() if not key.startswith(b"{interlock:")]  # those are for people
    seen = {(key.decode(), client.type(key).decode()): key for key in keys}
    assert {*seen} <= KEYS
    assert (wanted, "string") in seen
    for (name, _), key in seen.items():
        part = name.rpartition("{")[2].rstrip("}").removeprefix("plain-")
        if part in {"record", "done"}:
            assert matches({"done": "note"}.get(part, part), client.get(key)), client.get(key)
        elif part in {"waiters", "shares"}:
            for token, text in client.hgetall(key).items():
                assert token == b"sum" or matches(part.removesuffix("s"), text), text
