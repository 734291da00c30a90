"""A quorum whose servers judge themselves, and clients of the version before that, side by side (docs/upgrading.md)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from harness.older import unpacked_wheel
from harness.topology import Independents
from harness.topology.group import ask
from interlock._quarantine.voter import RECORD_TTL, VoterRecord, voter_key
from interlock.threads import Interlock

rule = pytest.mark.rule
pytestmark = pytest.mark.runs_on("its own servers", starts="a quorum of three servers of valkey-9.1")
BEFORE = "420b00ea"  # the last commit whose clients judge the servers of a quorum by their own memory
MAX_TTL = 3.0
PROGRAM = f"""
import sys
from interlock.threads import Interlock
from interlock import AcquireTimeout
with Interlock.quorum(sys.argv[1:], max_ttl={MAX_TTL}) as locks:
    lease = None
    for line in sys.stdin:
        verb, name = line.split()
        if verb == "take":
            try:
                lease = locks.lock(name, ttl=2, timeout=1).acquire()
                print("granted", lease.fence, flush=True)
            except AcquireTimeout as error:
                print("quarantined" if error.quarantined else "busy", flush=True)
        elif verb == "wait":
            lease = locks.lock(name, ttl=2, timeout=15).acquire()
            print("granted", lease.fence, flush=True)
        else:
            print(lease.release(), flush=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return unpacked_wheel(BEFORE, tmp_path_factory.mktemp("before"))


@pytest.fixture
def servers():
    with Independents(number=3) as made:
        yield made


@pytest.fixture
def older(source, servers):
    """Says a command to a process of the version before, and returns its answer, or does so later."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *servers.urls], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(source)},
    )  # fmt: skip

    def say(verb, name, *, later=False):
        process.stdin.write(f"{verb} {name}\n")
        process.stdin.flush()
        return process.stdout.readline if later else process.stdout.readline().split()

    with process:
        yield say
        process.stdin.close()


def adopt(servers):
    """What `interlock quorum adopt` writes: these servers have served all along."""
    for node in servers.nodes:
        replid = re.search("master_replid:([0-9a-f]+)", ask(node, "INFO", "replication"))[1]
        record = VoterRecord(replid, int(time.time() * 1000) - 60_000, 0).encode()
        ask(node, "SET", voter_key("lock:"), record, "EX", int(RECORD_TTL))


@rule(1, 7)
def test_both_versions_exclude_each_other_and_hand_over(servers, older):
    adopt(servers)
    with Interlock.quorum(servers.urls, max_ttl=MAX_TTL) as locks:
        # The version before trusts servers that were there before it, once they are older than max_ttl.
        first, fence = older("wait", "a")
        assert first == "granted"
        with pytest.raises(TimeoutError):
            locks.lock("a", timeout=0.3).acquire()
        assert older("give", "a") == ["True"]
        with locks.lock("a", ttl=2, timeout=5).acquire() as lease:
            assert lease.fence > int(fence)
            assert older("take", "a") == ["busy"]
            answer = older("wait", "a", later=True)
            while not locks.lock("a").inspect().waiting:
                time.sleep(0.01)
        second, later_fence = answer().split()
        assert second == "granted" and int(later_fence) > lease.fence


@rule(1, 10)
def test_an_abstention_holds_for_the_version_before_once_a_new_client_has_asked_for_the_name(servers, older):
    adopt(servers)
    with Interlock.quorum(servers.urls, max_ttl=MAX_TTL) as locks:
        assert older("wait", "a")[0] == "granted"
        assert older("give", "a") == ["True"]
        for node in servers.nodes:
            ask(node, "FLUSHALL")  # which the version before does not notice: it would be granted at once
        began = time.monotonic()
        assert locks.lock("a").try_acquire() is None
        assert older("take", "a") == ["quarantined"]
        assert older("wait", "a")[0] == "granted"
        assert time.monotonic() - began > MAX_TTL - 0.1
