"""Each log record about a lock carries `lock`, `kind`, `fence` and `token`, whatever its text says."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import interlock
from harness.modes import until
from interlock._protocol.lock_fields import lock_fields
from interlock.primitives.lock import lock_resource

SOURCE = Path(__file__).parents[2] / "src" / "interlock"
# Records about a server, a user's right, or a task in the background: no lock is their subject. By file, how many.
ABOUT_NO_LOCK = {
    "_people/answers.py": 1, "_people/observer.py": 1, "_people/registry.py": 3, "_client/outages.py": 2,
    "_protocol/forks.py": 1, "_session/fork_and_exit.py": 1,
    "_client/reports.py": 1, "_client/worker.py": 1, "_connect/address.py": 2, "_connect/server_check.py": 1,
    "_connect/target.py": 1, "_quarantine/server_history.py": 1, "_quarantine/lossless.py": 1,
    "_quarantine/proofs.py": 1, "_servers/quorum.py": 5, "_transports/asyncio/pool.py": 1,
    "_transports/asyncio/runtime.py": 1, "_transports/blocking/subscription.py": 1, "_transports/handshake.py": 1,
    "_transports/pushes.py": 1,
}  # fmt: skip

# Records of the adapters: about an application's start or page, or an election by its name, without its grant.
ABOUT_AN_APPLICATION = {
    "contrib/apscheduler.py": 4, "contrib/django/middleware.py": 1, "contrib/fastapi.py": 1,
    "contrib/starlette.py": 2, "contrib/web/feed.py": 2,
}  # fmt: skip


def calls_without_fields(path: Path) -> list[int]:
    """The lines of the calls `log.<level>(...)` in this file that pass no `extra=`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "log"
        and node.func.attr in {"debug", "info", "warning", "error", "exception", "critical", "log"}
        and not any(keyword.arg == "extra" for keyword in node.keywords)
    ]


def test_every_record_about_a_lock_carries_its_attributes():
    without = {str(path.relative_to(SOURCE)): calls_without_fields(path) for path in SOURCE.rglob("*.py")}
    found = {name: len(lines) for name, lines in sorted(without.items()) if lines}
    assert found == ABOUT_NO_LOCK | ABOUT_AN_APPLICATION, (
        "a record about a lock needs extra=lock_fields(resource) or extra=grant.log_fields"
    )


def test_the_attributes_are_on_the_record(caplog):
    log = logging.getLogger("interlock")
    log.warning("something about it", extra=lock_fields(lock_resource("stock:42", "lock:"), 7, "host/1/main/ab"))
    (record,) = caplog.records
    assert (record.lock, record.kind, record.fence, record.token) == ("stock:42", "lock", 7, "host/1/main/ab")


@pytest.mark.runs_on("valkey-9.1")
def test_a_lost_lease_is_logged_with_its_fence_and_token(server, clean, caplog):
    with interlock.Interlock(server.url) as locks:
        lease = locks.lock("a", renew=False, ttl=0.3).acquire()
        assert lease.lost.wait(30)
    (record,) = [each for each in caplog.records if "is lost" in each.message]
    assert (record.lock, record.kind, record.fence, record.token) == ("a", "lock", lease.fence, lease.token)
    assert record.levelno == logging.WARNING


@pytest.mark.runs_on("valkey-9.1")
async def test_a_callback_that_fails_is_logged_with_its_lease(mode, clean, caplog):
    locks = mode.interlock()

    def fails(_):
        raise ZeroDivisionError

    both = locks.multi(locks.lock("a", on_lost=fails, renew=False, ttl=0.3), locks.lock("b"), on_lost=fails)
    lease = await both.acquire()
    await until(lambda: len([each for each in caplog.records if "callback" in each.message]) == 2)
    found = {(record.lock, record.kind) for record in caplog.records if "callback" in record.message}
    assert found == {("a", "lock"), (lease.name, "multi")}
