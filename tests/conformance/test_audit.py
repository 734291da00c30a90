"""The audit on the server: who revoked what, when, why and with what result; and revocations that it can't get."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from harness.matrix import PASSWORD, USER, least_rights
from harness.modes import outcome
from interlock import ConfigError, Unavailable
from interlock._people import revocation
from interlock._people.revocation import Revoking
from interlock.primitives.audit import AUDIT_KEY, PAGE

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("valkey-9.1", full="each server in both modes", quorum=True)


async def audited(locks, *words, **options):
    """What the audit has."""
    return await revocation.audit(await core_of(locks), *words, **options)


async def core_of(locks):
    await locks.lock("any").inspect()  # which opens the session
    return locks._session.core


async def test_each_revocation_is_noted_with_who_whom_why_and_its_result(mode):
    locks, others = mode.interlock(), mode.interlock(label="on call")
    lease = await mode.keep(locks.lock("a").acquire())
    assert not await others.lock("free").revoke("nobody is there")  # nothing to note
    assert await others.lock("a").revoke("it hangs\x1b\n")
    assert await others.lock("a").revoke("it still hangs", force=True)
    forced, asked = await audited(others)
    assert (asked.name, asked.key, asked.kind, asked.reason) == ("a", "lock:a", "lock", "it hangs")
    assert asked.by.startswith("on-call@") and asked.holders == (lease.token,) and asked.holding == 1
    assert (asked.forced, forced.forced, asked.result, forced.result) == (False, True, "revoked", "revoked")
    assert forced.holders == (lease.token,)
    assert abs((datetime.now(UTC) - asked.at).total_seconds()) < 60 and asked.at <= forced.at


@pytest.mark.not_on_a_quorum
async def test_each_kind_is_in_the_audit_and_the_stream_has_a_ttl_and_a_bound(mode, clean):
    locks = mode.interlock()
    pipeline = clean.pipeline()
    for n in range(2500):
        pipeline.xadd(AUDIT_KEY, {"operation": f"old/{n}", "step": "asked"})
    pipeline.execute()
    for lockable in (locks.semaphore("s", 3), locks.rwlock("w").read(), locks.election("e")):
        await mode.keep(lockable.acquire())
        assert await lockable.revoke("x")
    await locks.latch("l", 2).count_down()
    assert await locks.latch("l", 2).revoke("x")
    found = await audited(locks)
    assert [each.kind for each in found] == ["latch", "election", "rwlock", "semaphore"]
    assert all(each.result == "revoked" for each in found)
    assert clean.xlen(AUDIT_KEY) < 2200
    assert 0 < clean.pttl(AUDIT_KEY) <= 90 * 86_400_000


async def test_a_revocation_whose_process_died_or_got_no_answer_says_so(mode, monkeypatch):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    core, resource = await core_of(locks), locks.lock("a")._primitive
    await Revoking(core, resource, "dies", force=False)._note_asked(["h/1/t/x", "of another\nlibrary"])

    async def away(*_):
        raise Unavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(type(core.requests), "query", away)
        with pytest.raises(Unavailable):
            await Revoking(core, resource, "no answer", force=True).revoke([b"h/1/t/x"])
    assert not await Revoking(core, resource, "late", force=True).revoke([b"h/1/t/x"])  # another one holds it
    late, unanswered, died = await audited(locks)
    assert (died.reason, died.result, died.holders) == ("dies", None, ("h/1/t/x", "of_another_library"))
    assert (unanswered.reason, unanswered.result) == ("no answer", "unknown: Unavailable")
    assert "nothing" in late.result
    assert (await locks.lock("a").inspect()).held


async def test_the_audit_of_one_name_is_read_page_by_page(mode):
    locks = mode.interlock()
    core = await core_of(locks)
    for n in range(PAGE // 2 + 20):
        revoking = Revoking(core, locks.lock("b" if n else "a")._primitive, f"reason {n}", force=False)
        await revoking._note_asked([])
        await revoking.note("revoked")
    (first,) = await audited(locks, "a")
    assert first.reason == "reason 0" and first.result == "revoked"
    newest = await audited(locks, None, 3)
    assert [each.reason for each in newest] == [f"reason {PAGE // 2 + 19 - n}" for n in range(3)]
    assert await audited(locks, "nobody") == []


@pytest.mark.not_on_a_quorum
async def test_an_entry_twice_or_of_another_version_is_read_as_it_may(mode, clean):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    assert await locks.lock("a").revoke("x")
    for _, fields in clean.xrange(AUDIT_KEY):
        clean.xadd(AUDIT_KEY, fields)  # the request was sent twice
    clean.xadd(AUDIT_KEY, {"operation": "later", "step": "asked", "words": "of a later version"})
    clean.xadd(AUDIT_KEY, {"nothing": "of ours"})
    clean.xadd(AUDIT_KEY, {str(i): "x" for i in range(10_000)})  # more than Lua can unpack
    (found,) = await audited(locks)
    assert (found.name, found.result) == ("a", "revoked")


@pytest.mark.not_on_a_quorum
@rule(6)
async def test_without_the_right_to_write_the_audit_a_revocation_works_and_warns(mode, server, clean, caplog):
    locks = mode.interlock()
    lease = await mode.keep(locks.lock("a").acquire())
    clean.execute_command("ACL SETUSER", *least_rights().split(), "-xadd")
    others = mode.interlock(f"unix://{USER}:{PASSWORD}@{server.socket}")
    with caplog.at_level(logging.WARNING):
        assert await others.lock("a").revoke("it hangs")
    assert "lock 'a': the audit on the server does not get this revocation" in caplog.text and "+xadd" in caplog.text
    clean.execute_command("ACL SETUSER", USER, "-xrevrange")
    assert isinstance(await outcome(audited(others)), ConfigError)
    await outcome(lease.release())
    await others.close()
    mode.made.remove(others)
    clean.acl_deluser(USER)


@pytest.mark.not_on_a_quorum
async def test_a_run_that_was_revoked_can_still_be_taken_by_force(mode, clean):
    token = f"h/1/t/{'0' * 32}"
    clean.set("lock:o", f"!{token}", px=30_000)
    clean.set("{lock:o}{record}", f"1 once 5 - 30000 - {token} - !it hangs", px=30_000)
    locks = mode.interlock()
    assert not await locks.once("o", at_most=20).revoke("again")
    assert await locks.once("o", at_most=20).revoke("it still hangs", force=True)
    assert not clean.exists("lock:o")
    (found,) = await audited(locks)
    assert (found.kind, found.holders) == ("once", (token,))


async def test_a_revocation_without_a_reason_is_noted_nowhere(mode):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    for reason in ("", " \n", None, 7):
        with pytest.raises(ConfigError, match="needs a reason"):
            await locks.lock("a").revoke(reason)
    assert await audited(locks) == []


@pytest.mark.not_on_a_quorum
async def test_bytes_that_are_no_text_keep_nobody_from_revoking(mode):
    locks = mode.interlock()
    await mode.keep(locks.lock("a").acquire())
    assert await mode.interlock().lock("a").revoke("it\x9b31mhangs \udcff")  # as argv has them
    (asked,) = await audited(locks)
    assert asked.reason == "it 31mhangs"
    assert "needs a reason" in str(await outcome(locks.lock("a").revoke("\udcff\x85")))
