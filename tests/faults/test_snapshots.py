"""A process that is restored twice from one snapshot (a cloned virtual machine, SnapStart), and its locks."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from harness.processes import PROGRAMS
from interlock import Interlock
from model.histories.checker import History, check
from model.histories.lines import read

pytestmark = pytest.mark.runs_on("valkey-9.1")

PROGRAM = PROGRAMS / "clones.py"


class Image:
    """A process before its snapshot."""

    def __init__(self, mode, url, directory, what) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), mode, url, str(directory), what],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self):
        if self.process.stdout.readline() != "ready\n":
            self.process.kill()
            pytest.fail(self.process.communicate()[1])
        return self

    def snapshot(self):
        """Take the snapshot, and restore it twice."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def lines(self):
        """The lines that the two clones wrote until they ended."""
        _, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, stderr
        return read(self.directory)

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()


def of(lines, event, clone=None):
    return [line for line in lines if line["e"] == event and clone in {None, line["p"]}]


def exclude_each_other(lines):
    """Fails unless the sections of two processes with one memory exclude each other."""
    one, other = (of(lines, "memory", clone)[0] for clone in ("c0", "c1"))
    assert (one["channel"], one["me"]) == (other["channel"], other["me"])
    assert not check(History.of([line for line in lines if "h" in line]))
    got = of(lines, "got")
    assert {line["p"] for line in got} == {"c0", "c1"}
    assert len({line["token"] for line in got}) == len(got)
    turns = [line["p"] for line in got]
    assert sum(a != b for a, b in pairwise(turns)) > 3, "they were not at work at one time"


@pytest.mark.rule(8, 11)
@pytest.mark.parametrize("mode_name", ["threads", "asyncio"])
def test_two_processes_with_one_memory_exclude_each_other_from_their_next_acquire_on(
    mode_name, server, clean, tmp_path
):
    with Image(mode_name, server.url, tmp_path, "idle") as image:
        image.snapshot()
        exclude_each_other(image.lines())


def test_without_random_numbers_from_the_kernel_two_clones_do_not_exclude_each_other(server, clean, tmp_path):
    """The restore of a virtual machine has to see to it that the kernel of each clone draws other random numbers."""
    with Image("asyncio", server.url, tmp_path, "predictable") as image:
        image.snapshot()
        lines = image.lines()
    one, other = ({line["token"] for line in of(lines, "got", clone)} for clone in ("c0", "c1"))
    assert one & other, "one token, and so one lease, in both"


@pytest.mark.rule(11)
def test_both_clones_rely_on_a_lease_from_before_the_snapshot_until_one_releases_it(server, clean, tmp_path):
    """As docs/failover.md says: such a lease is worth nothing."""
    with Image("asyncio", server.url, tmp_path, "holds") as image, Interlock(server.url, max_ttl=5) as locks:
        image.snapshot()
        with locks.lock("held").acquire(20):  # one of the two has given it back
            pass
        lines = image.lines()
    assert {line["p"] for line in of(lines, "across")} == {"c0", "c1"}, "both have renewed it, and believe"
    assert len({line["token"] for line in of(lines, "across")}) == 1
    assert [line["ours"] for line in of(lines, "gave back")] == [True]
    (told,) = of(lines, "told")
    assert (told["state"], told["ours"]) == ("lost", False)
    exclude_each_other(lines)


@pytest.mark.rule(11)
def test_both_clones_of_a_waiter_acquire_the_lock(server, clean, tmp_path):
    with Interlock(server.url, max_ttl=5) as locks:
        lease = locks.lock("held").acquire(5)
        with Image("asyncio", server.url, tmp_path, "waits") as image:
            image.snapshot()
            lease.release()
            lines = image.lines()
    assert {line["p"] for line in of(lines, "across")} == {"c0", "c1"}
    assert len({line["token"] for line in of(lines, "across")}) == 1, "one attempt, and one grant"
    exclude_each_other(lines)
