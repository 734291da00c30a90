"""The registry: who holds what and who waits for it, and where in their code, as their processes say themselves."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
import time

import pytest

from harness.matrix import PASSWORD, least_rights
from harness.modes import outcome, until, waiting
from harness.processes import processes
from interlock import AcquireTimeout, ConfigError
from interlock._people import answers, long_waits, looks
from interlock._protocol.server import Disconnected, ServerError
from interlock._protocol.timing import FOREVER
from interlock._protocol.tokens import Process
from interlock.primitives.registry import INDEX, REGISTRY, Item, ReportCall, encode_entry, entries_key

pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes")

KINDS = {
    "lock": lambda locks: locks.lock("a"),
    "rwlock": lambda locks: locks.rwlock("a").write(),
    "semaphore": lambda locks: locks.semaphore("a", 1),
    "election": lambda locks: locks.election("a"),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Sessions report several times a second."""
    from interlock._people import registry as client

    monkeypatch.setattr(client, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(answers, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(looks, "REPORT_INTERVAL", 0.1)
    for module in ("_client.acquiring", "_people.long_waits"):  # a busy machine may take long for an answer
        monkeypatch.setattr(f"interlock.{module}.UNDO_GRACE", 20.0)
    monkeypatch.setattr(client, "REPORT_DELAY", 0.05)


def waits_for(lockable, timeout=30):
    """A task whose own code waits: no line of ours is on the stack of a task made of `acquire()` itself."""

    async def wait():
        return await lockable.acquire(timeout=timeout)

    return asyncio.ensure_future(outcome(wait()))


async def holders_of(locks, name="a"):
    return [party for each in await locks.ls() if each.name == name for party in each.holders]


@pytest.mark.parametrize("kind", KINDS)
async def test_ls_says_who_holds_it_and_who_waits_for_it_and_where(mode, kind):
    locks, others = mode.interlock(label="web"), mode.interlock()
    lease = await KINDS[kind](locks).acquire()
    wait = waits_for(KINDS[kind](others))

    async def complete():
        found = await others.ls("a*")
        return found and all(each.place for each in (*found[0].holders, *found[0].waiters)) and found[0].waiters

    await until(complete)
    (found,) = await others.ls("a*")
    assert (found.kind, found.name, found.prefix) == (kind, "a", "lock:")
    (holder,), (waiter,) = found.holders, found.waiters
    assert (holder.token, holder.fence, holder.label) == (lease.token, lease.fence, "web")
    assert (waiter.fence, waiter.label) == (None, "")
    for party in holder, waiter:
        assert re.search(r"\.py:\d+$", party.place)
        assert f"{party.host}/{party.pid}/{party.caller}/" in party.token
        assert 0 <= party.reported_ago <= party.seconds < 30
        assert not party.is_silent
    assert holder.caller_id != waiter.caller_id or mode.name == "threads"  # a thread of the pool may do both
    assert await others.ls("b*") == []
    await lease.release()
    assert await (await wait).release()


@pytest.mark.runs_on("each server and way", full="every combination", quorum=True)
async def test_every_kind_of_server_keeps_entries(mode):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: holders_of(others))
    (holder,) = await holders_of(others)
    assert (holder.token, holder.fence) == (lease.token, lease.fence)
    await lease.release()

    async def is_gone():
        return not await others.ls()

    await until(is_gone)
    assert await locks.ping() < 30


async def test_an_entry_ends_with_the_last_lease_and_no_key_lasts_for_ever(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: clean.exists(INDEX))
    (entries,) = clean.keys(f"{INDEX}:*")
    assert 0 < clean.pttl(INDEX) <= 60_000
    assert 0 < clean.pttl(entries) <= 60_000
    await lease.release()
    await until(lambda: not clean.exists(INDEX, entries))
    again = await locks.lock("a").acquire()  # and begins anew
    await until(lambda: clean.exists(INDEX))
    await again.release()


async def test_close_deletes_the_entry_at_once(mode, clean):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    await until(lambda: clean.exists(INDEX))
    await locks.close()
    assert not clean.keys("{interlock:*")


async def test_a_dead_process_leaves_its_entry_so_that_people_see_where_it_was(mode, clean):
    locks = mode.interlock()
    async with processes(mode, 1) as (process,):
        await process.do("acquire", "a", {}, 5)
        await until(lambda: clean.exists(INDEX))
        await process.end(signal.SIGKILL)
        (holder,) = await holders_of(locks)
        assert holder.pid == process.process.pid
        assert "lock_client.py:" in holder.place
        error = await waits_for(locks.lock("a"), 1.5)
        assert isinstance(error, AcquireTimeout)
        assert error.place == holder.place
        assert re.search(
            rf"It was acquired \S+ s ago at {re.escape(holder.place)}; its process has ended\. Wait", str(error)
        )


@pytest.mark.asyncio_only  # a thread of the pool would wait for itself
async def test_a_holder_in_this_process_is_named_without_asking(mode):
    locks, others = mode.interlock(registry=False), mode.interlock()
    lease = await locks.lock("a").acquire()
    error = await waits_for(others.lock("a"), 1.0)
    assert error.place == re.search(r"at (\S+\.py:\d+)\.", str(error))[1]
    assert "Wait longer" in str(error)
    short = await waits_for(others.lock("a"), 0.2)  # a short wait asks nothing
    assert short.place is None
    await lease.release()


async def test_a_long_timeout_names_the_holder_of_its_end(mode, monkeypatch):
    from interlock._client import acquiring

    monkeypatch.setattr(acquiring, "LONG_TIMEOUT", 1.0)
    locks, others, third = (mode.interlock() for _ in range(3))
    for timeout in (2.0, 10.0, 25.0):  # on a slow machine the time may be over before the lock is handed over
        lease = await locks.lock("a").acquire()
        next_one = waits_for(third.lock("a"))
        await until(lambda: waiting(locks.lock("a"), 1))
        late = waits_for(others.lock("a"), timeout)
        await until(lambda late=late: late.done() or waiting(locks.lock("a"), 2))
        await lease.release()
        following, is_too_late = await next_one, late.done()
        error = await late
        await following.release()
        if not is_too_late:
            break
    assert error.holder == following.token


async def test_it_can_be_turned_off(mode, clean):
    locks = mode.interlock(registry=False)
    lease = await locks.lock("a", ttl=3.0).acquire()
    await until(lambda: clean.pttl("lock:a") < 2500)
    await until(lambda: clean.pttl("lock:a") > 2500)  # its workers have been at work: it was renewed
    assert not clean.exists(INDEX)
    assert await locks.ls() == []
    await lease.release()


async def test_a_server_that_refuses_entries_refuses_no_lock(mode, server, clean, caplog):
    caplog.set_level(logging.INFO, "interlock")
    _, *rules = least_rights().replace(" ~{interlock:processes}*", "").split()
    clean.execute_command("ACL SETUSER", "refused", "reset", *rules)  # the cells of `acl` have a user with more rights
    locks = mode.interlock(f"unix://refused:{PASSWORD}@{server.socket}")
    lease = await locks.lock("a").acquire()
    await until(lambda: "refuses the entries of the registry" in caplog.text)
    assert "registry=False" in caplog.text
    error = await outcome(locks.ls())
    assert isinstance(error, ConfigError)
    assert "{interlock:processes}*" in str(error)
    assert await lease.release()
    assert await locks.ping() < 30
    clean.acl_deluser("refused")


async def test_keys_of_somebody_else_in_its_place_break_no_lock(mode, clean):
    clean.set(INDEX, "somebody else's", ex=60)
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: mode.session(locks).registry.refused)
    error = await outcome(locks.ls())
    assert isinstance(error, ConfigError)
    assert "holds something else" in str(error)
    assert clean.get(INDEX) == b"somebody else's"
    assert await lease.release()
    clean.delete(INDEX)


async def test_entries_that_this_version_can_not_read_hide_no_others(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: clean.exists(INDEX))
    now_ms = int(time.time() * 1000)
    item = ["lock", "b", "lock:", "t", 1, "x.py:1", 0, "", "", 1, 1, 0]
    good = json.dumps({"v": 1, "library": "9", "holds": [[*item, "of a later version"]], "waits": [], "more": 1})
    for process, entry in {
        "h/1": good,
        "h/2": json.dumps({"v": 2, "holds": "anew"}),
        "h/3": "[" * 100_000,
        "h/4": json.dumps({"v": 1, "holds": [["lock"]], "waits": []}),
        "h/5": json.dumps({"v": 1, "holds": [[1, *item[1:]]], "waits": []}),
        "no number": good,
        "\xff": good,
    }.items():
        clean.zadd(INDEX, {process: now_ms + 60_000})
        clean.hset(entries_key(process), "s", f"{now_ms} {entry}")
        clean.hset(entries_key(process), "of nobody", "nonsense")
        clean.pexpire(entries_key(process), 60_000)
    clean.set("lock:b", "t", ex=60)
    found = await locks.ls()
    assert [each.name for each in found] == ["a", "b"]
    assert found[1].holders[0].place == "x.py:1"
    await lease.release()


async def test_a_key_of_somebody_else_hides_no_other_process(mode, clean):
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: clean.exists(INDEX))
    clean.zadd(INDEX, {"h/1": int(time.time() * 1000) + 60_000})
    clean.set(entries_key("h/1"), "somebody else's", ex=60)
    assert [each.name for each in await locks.ls()] == ["a"]
    await lease.release()


async def test_a_server_without_memory_gets_no_entry(mode, clean, caplog):
    caplog.set_level(logging.INFO, "interlock")
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    clean.config_set("maxmemory", 1)
    try:
        clean.delete(INDEX, *clean.keys(f"{INDEX}:*"))  # of a report that came before
        await until(lambda: "refuses the entries of the registry" in caplog.text)
        assert not clean.keys("{interlock:*")
        lease.ensure()
    finally:
        clean.config_set("maxmemory", 0)
    assert await lease.release()


async def test_an_entry_has_the_oldest_leases_and_waiters_only(mode, clean):
    locks = mode.interlock()
    leases = [await locks.lock(f"lock {i:02}").acquire() for i in range(55)]

    async def complete():
        return len(await locks.ls()) == 50

    await until(complete)
    assert [each.name for each in await locks.ls()] == [f"lock {i:02}" for i in range(50)]
    for lease in leases:
        await lease.release()


async def test_a_long_wait_is_logged_with_growing_pauses(mode, caplog, monkeypatch):
    monkeypatch.setattr(long_waits, "FIRST", 0.2)
    caplog.set_level(logging.INFO, "interlock")
    locks, others = mode.interlock(), mode.interlock(registry=False)
    lease = await locks.lock("a").acquire()
    began = time.time()
    waits = [waits_for(others.lock("a")) for _ in range(3)]

    def lines(words):
        return [each for each in caplog.records if words in each.getMessage()]

    await until(lambda: len(lines("as 2 more")) >= 3)
    for record in lines("as 2 more"):
        assert re.search(
            r"^lock 'a': waiting for \d+ s at .*\.py:\d+, as 2 more callers of this process do; held by "
            + re.escape(lease.token)
            + r", for \d+ s, since .*\.py:\d+$",
            record.getMessage(),
        )
        assert record.lock == "a"
    for i, record in enumerate(lines("waiting for")):
        assert record.created >= began + 0.2 * 2**i
    await lease.release()
    for wait in asyncio.as_completed(waits):
        assert await (await wait).release()


async def test_a_pattern_must_be_a_text(mode):
    assert "ls(): the pattern must be a str" in str(await outcome(mode.interlock().ls(42)))


async def test_a_short_section_costs_no_message(mode, clean, monkeypatch):
    from interlock._people import registry as client

    monkeypatch.setattr(client, "REPORT_DELAY", 2.0)  # longer than a section takes on a slow machine
    locks = mode.interlock()
    for _ in range(3):
        assert await (await locks.lock("a").acquire()).release()
    registry = mode.session(locks).registry
    await until(lambda: registry.next_look == FOREVER)  # it has looked, or had no reason to
    assert registry.reported_at == -FOREVER
    assert not clean.exists(INDEX)


FOREIGN = f"h/1/t/{0:032x}"  # the token of a holder whose process says what a test has written


def said_by_foreign(clean, items):
    """Let somebody hold "a", and let the registry say this of its process."""
    clean.set("lock:a", FOREIGN, px=60_000)
    entry = json.dumps({"v": 1, "library": "9", "holds": items, "waits": []})
    clean.hset(entries_key("h/1"), "s", f"{int(time.time() * 1000)} {entry}")
    clean.pexpire(entries_key("h/1"), 60_000)


def foreign(place="x.py:1", fence=1.0):
    return ["lock", "a", "lock:", FOREIGN, fence, place, 0, "", ""]


async def test_no_contents_of_the_registry_change_the_error_of_a_caller(mode, clean, monkeypatch):
    monkeypatch.setattr("interlock._people.timeouts.MIN_WAIT_TO_ASK", 0.2)
    locks, other = mode.interlock(), mode.interlock()
    for each in (locks, other):
        await each.ping()  # connecting is not what the timeouts are for
    for place, fence in (("x.py:1", float("inf")), ("x.py:1", float("nan")), (["x"], 1)):
        said_by_foreign(clean, [foreign(place, fence)])
        error = await waits_for(locks.lock("a"), 0.4)
        assert type(error) is AcquireTimeout, repr(error)
        assert (error.holder, error.place) == (FOREIGN, None)
    said_by_foreign(clean, [foreign("x.py:1\n\x1b[31mred")])
    error = await waits_for(other.lock("a"), 0.4)
    assert error.place == r"x.py:1\n\x1b[31mred"
    assert str(error).isprintable()


async def test_a_fault_of_the_registry_changes_no_error(mode, clean, caplog, monkeypatch):
    monkeypatch.setattr("interlock._people.timeouts.MIN_WAIT_TO_ASK", 0.2)
    clean.set("lock:a", FOREIGN, px=60_000)
    locks = mode.interlock()

    async def fails(token, until):
        raise ZeroDivisionError

    await (await locks.lock("b").acquire()).release()
    mode.session(locks).registry.holding = fails
    error = await waits_for(locks.lock("a"), 0.4)
    assert type(error) is AcquireTimeout
    assert "does not say where its holder is" in caplog.text


async def test_the_question_and_the_undo_share_their_time(mode, clean, monkeypatch):
    monkeypatch.setattr("interlock._people.timeouts.MIN_WAIT_TO_ASK", 0.2)
    clean.set("lock:a", FOREIGN, px=60_000)
    locks = mode.interlock()
    await (await locks.lock("b").acquire()).release()
    session, ends = mode.session(locks), []

    async def asks(token, until):
        ends.append(until)

    class Undone:
        async def wait(self, until):
            ends.append(until)

    session.registry.holding = asks
    session.undo.add = lambda attempt, add=session.undo.add: add(attempt) and Undone()
    assert type(await waits_for(locks.lock("a"), 0.4)) is AcquireTimeout
    asked, undone = ends
    assert asked == undone


async def test_of_many_callers_whose_time_is_over_one_asks(mode, clean, monkeypatch):
    """Also if they wait for several holders of one process."""
    monkeypatch.setattr(answers, "REPORT_INTERVAL", 20.0)
    monkeypatch.setattr("interlock._client.acquiring.UNDO_GRACE", 20.0)
    other = f"h/1/t/{1:032x}"
    said_by_foreign(clean, [foreign(), ["lock", "c", "lock:", other, 1, "x.py:1", 0, "", ""]])
    clean.set("lock:c", other, px=60_000)
    locks = mode.interlock()
    await (await locks.lock("b").acquire()).release()
    registry, asked = mode.session(locks).registry, []

    async def reads(processes, until, read=registry.entries_of):
        asked.extend(processes)
        await registry.runtime.sleep_until(registry.runtime.now() + 0.5)
        return await read(processes, until)

    registry.entries_of = reads
    errors = await asyncio.gather(*(waits_for(locks.lock(name), 1.0) for name in "aaaaaaaaaacccccccccc"))
    # One whose turn to ask the server came in its last moment does not spend more time on a question.
    assert {error.place for error in errors if error.__context__ is None} == {"x.py:1"}
    assert asked == [Process("", "h", 1)]


@pytest.mark.parametrize("held_up", ["request", "reply"])
async def test_a_close_during_a_report_leaves_no_entry(mode, clean, held_up):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    session = mode.session(locks)
    registry, server, reports = session.registry, session.server, []

    async def closing():
        while not registry.ended:
            await registry.runtime.sleep_until(registry.runtime.now() + 0.005)

    async def slow(script, keys, args, *rest, call=server.call):
        if script is not REGISTRY.script:
            return await call(script, keys, args, *rest)
        reports.append(args)
        if held_up == "request":
            await closing()
        reply = await call(script, keys, args, *rest)
        if held_up == "reply":
            await closing()
        return reply

    server.call = slow
    await until(lambda: reports and (held_up == "request" or clean.exists(INDEX)))
    await locks.close()
    assert not clean.keys("{interlock:*")
    assert len(reports) == 1


async def test_an_exit_during_a_report_leaves_no_entry(server, clean):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", EXITS_DURING_A_REPORT, server.url)
    assert await process.wait() == 0
    assert not clean.keys("{interlock:*")


# Its report is sent as late as may be: when somebody waits for it, or behind what deletes its entry.
EXITS_DURING_A_REPORT = """
import sys, threading, time
from interlock import Interlock
from interlock._people import registry
from interlock._session import fork_and_exit

registry.REPORT_DELAY, fork_and_exit.CLOSE_TIMEOUT = 0.05, 30.0
locks = Interlock(sys.argv[1])
lease = locks.lock("a").acquire()
reports, server = locks._session.registry, locks._session.server
begun, left, reported = threading.Event(), threading.Event(), threading.Event()

async def slow(script, keys, args, until, call=server.call):
    if args[0] == "report":
        begun.set()
        while not (reports.ended or left.is_set()):
            time.sleep(0.001)
    try:
        return await call(script, keys, args, until)
    finally:
        reported.set()

async def leaves(messages, until, call_many=server.call_many):
    replies = await call_many(messages, until)
    if messages[0][2][0] == "leave":
        left.set()
        reported.wait(30)
    return replies

server.call, server.call_many = slow, leaves
reports.look()
begun.wait(30)
"""


async def test_a_process_that_was_stopped_before_a_report_knows_that_it_has_an_entry(mode, clean):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    registry = mode.session(locks).registry
    await until(lambda: registry.has_entry)
    registry.reported = None
    await registry._report(registry.book.held(), [], registry.runtime.now() - 300)  # it was stopped since its look
    assert registry.has_entry


async def test_a_server_that_is_not_ready_gets_the_report_soon(mode, clean, caplog):
    caplog.set_level(logging.INFO, "interlock")
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    server, refusals = mode.session(locks).server, ["LOADING it reads its data", "OOM no memory"]

    async def unready(script, *rest, call=server.call):
        if script is REGISTRY.script and refusals:
            raise ServerError(refusals.pop(0))
        return await call(script, *rest)

    server.call = unready
    registry = mode.session(locks).registry
    await until(lambda: registry.refused)  # after the second
    assert "LOADING" not in caplog.text
    assert "no memory" in caplog.text
    assert not registry.has_entry
    registry.refused_until = 0.0
    await until(lambda: clean.exists(INDEX))
    await until(lambda: not registry.refused)


async def test_a_report_and_a_farewell_without_a_reply_are_sent_again(mode, clean):
    """The server has executed both, and the client can't know."""
    locks = mode.interlock()
    lease = await locks.lock("a").acquire()
    session, lost = mode.session(locks), []

    async def loses(script, keys, args, until, call=session.server.call):
        reply = await call(script, keys, args, until)
        if script is REGISTRY.script and args[0] not in lost:
            lost.append(args[0])
            raise Disconnected("the reply is lost", sent=True)
        return reply

    session.server.call = loses
    await until(lambda: session.registry.reported == (frozenset({lease.token}), frozenset()))
    assert lost == ["report"]
    assert clean.exists(INDEX)
    assert await lease.release()
    await until(lambda: session.registry.reported is None)
    assert lost == ["report", "leave"]
    assert not clean.exists(INDEX)


@pytest.mark.asyncio_only
async def test_a_cancellation_during_the_question_of_an_error_leaves_nothing_behind(mode, clean, monkeypatch):
    monkeypatch.setattr("interlock._people.timeouts.MIN_WAIT_TO_ASK", 0.2)
    monkeypatch.setattr("interlock._client.acquiring.UNDO_GRACE", 20.0)
    clean.set("lock:a", FOREIGN, px=60_000)
    locks = mode.interlock()
    await (await locks.lock("b").acquire()).release()
    asked = asyncio.Event()

    async def asks(token, until):
        asked.set()
        await asyncio.sleep(20)

    mode.session(locks).registry.holding = asks
    caller = asyncio.ensure_future(locks.lock("a").acquire(0.4))
    await asked.wait()
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    await until(lambda: waiting(locks.lock("a"), 0))


async def test_a_refused_report_leaves_the_last_entry_to_be_deleted(mode, clean, monkeypatch):
    from interlock._people import registry as client

    monkeypatch.setattr(client, "REPEAT_INTERVAL", 0.1)
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    session = mode.session(locks)
    await until(lambda: session.registry.has_entry and session.registry.sending is None)

    async def refuses(script, *rest, call=session.server.call):
        if script is REGISTRY.script:
            raise ServerError("OOM no memory")
        return await call(script, *rest)

    session.server.call = refuses
    await until(lambda: session.registry.refused)
    assert clean.exists(INDEX)
    await locks.close()
    assert not clean.keys("{interlock:*")


async def test_an_entry_names_the_caller_to_which_a_lease_has_passed(mode):
    locks, others = mode.interlock(), mode.interlock()
    lease = await locks.lock("a").acquire()
    wait = waits_for(locks.lock("a"))

    async def waiters():
        return [waiter for each in await others.ls() for waiter in each.waiters]

    await until(waiters)
    (waiter,) = await waiters()
    await lease.release()
    following = await wait
    assert following.token == lease.token  # it has passed

    async def said():
        return [holder for holder in await holders_of(others) if holder.fence == following.fence]

    await until(said)
    (holder,) = await said()
    assert (holder.caller, holder.caller_id) == (waiter.caller, waiter.caller_id)
    await following.release()


async def test_a_long_wait_for_a_caller_of_this_process_is_logged_without_a_registry(mode, caplog, monkeypatch):
    monkeypatch.setattr(long_waits, "FIRST", 0.2)
    caplog.set_level(logging.INFO, "interlock")
    locks = mode.interlock(registry=False)
    lease = await locks.lock("a").acquire()
    wait = waits_for(locks.lock("a"))
    await until(lambda: f"held by {lease.token}, for" in caplog.text)
    await lease.release()
    assert await (await wait).release()


def report(clean, session, text=""):
    entry = text or encode_entry("1", [Item("lock", session, "lock:", "h/1/t/r", 1, "x.py:1", 0.0, "", "")], [])
    (script, keys, args) = ReportCall("h/1", session, "60000", entry).message
    clean.eval(script.source, len(keys), *keys, *args)


@pytest.mark.asyncio_only  # of the script
async def test_many_sessions_of_a_process_cost_the_server_little(mode, clean):
    def reads():
        return clean.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"]

    for i in range(20):
        report(clean, f"session {i}")
    before = reads()
    for i in range(200):
        report(clean, f"session {i % 20}")
    assert reads() == before
    for i in range(1000):
        report(clean, f"more {i}")
    assert clean.hlen(entries_key("h/1")) == 256
    report(clean, "session 1", "still stored")
    assert b"still stored" in clean.hget(entries_key("h/1"), "session 1")
    session = mode.session(mode.interlock())
    entries, _ = await session.registry.all_entries(session.core.requests.query)
    assert len(entries) == 255


async def test_a_search_reads_no_more_sessions_than_it_may(mode, clean):
    for i in range(5):
        report(clean, f"session {i}")
    registry = mode.session(mode.interlock()).registry
    until = registry.runtime.now() + 30
    assert len(await registry.some_entries(5, until)) == 5
    assert await registry.some_entries(4, until) is None


@pytest.mark.asyncio_only  # of the script
async def test_a_new_entry_of_a_process_replaces_those_that_are_over(mode, clean):
    key = entries_key("h/1")
    for number in 30, 255, 256:
        clean.delete(key)
        clean.hset(key, mapping={f"old {i}": f"1000 {i}" for i in range(number)})
        count = iter(range(10_000))

        def cleaned(key=key, count=count):
            report(clean, f"new {next(count)}")
            return not clean.hexists(key, "old 1")

        await until(cleaned)
        assert clean.hlen(key) <= 16 + next(count)


@pytest.mark.asyncio_only  # in a thread nobody can stop the caller between the two
async def test_a_caller_that_has_been_granted_the_lease_and_has_not_run_since_waits_no_more(mode):
    """Else its entry says that it holds and awaits one lock, and others take that for a deadlock."""
    locks = mode.interlock()
    session = mode.session(locks)
    lease = await locks.lock("a").acquire()
    wait = waits_for(locks.lock("a"))
    await until(session.cohorts.waiting)
    (attempt,) = session.cohorts.waiting()
    hold = lease._grant.hold
    following = type(lease._grant)(hold, attempt, 0, session.runtime.now())
    hold.grant, before = following, hold.grant  # as Cohorts.pass_on() does; nobody has woken the caller
    try:
        session.registry.next_look = session.runtime.now() - 1
        assert await session.registry.report() == []
        (entry,) = await session.registry.entries_of([session.registry.process], session.runtime.now() + 30)
    finally:
        hold.grant = before
    assert [item.name for item, _ in entry.holds] == ["a"]
    assert entry.waits == []
    await lease.release()
    await (await wait).release()


async def test_what_an_entry_says_of_an_earlier_holder_gives_way_to_the_server(mode, clean):
    locks, others = mode.interlock(label="web"), mode.interlock()
    lease = await locks.lock("a").acquire()
    await until(lambda: holders_of(others))

    async def has_place():
        return (await holders_of(others))[0].place

    await until(has_place)
    clean.set("lock:a", "vm/1/MainThread/" + "0" * 32, px=60_000)  # somebody else has it by now
    (holder,) = await holders_of(others)
    assert (holder.pid, holder.place, holder.caller) == (1, "", "MainThread")
    clean.delete("lock:a")
    assert await holders_of(others) == []
    await outcome(lease.release())
