"""What the server spends on a call, by INFO commandstats: server-time, server-handover.

Calls are sent in pipelines of a hundred, so the server runs them hot, one after another. They are the messages that
this checkout sends, those that another checkout sends, and those of the smallest scripts that do the work at all.
"""

from __future__ import annotations

import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkouts import NAME, ROOT, Messages, Template, fresh_token, record
from floor import Bare
from goals import BEFORE, OURS, SMALLEST
from measure import Bench, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = 100  # of each kind, in one pipeline
WAITERS = 10  # in the queue, all the time
ONE_LOCK, MANY_LOCKS = "on one lock", f"on {CALLS} locks in turn"
# The smallest script that excludes; with a queue, the smallest that hands over in order and wakes the next.
PLAIN_ACQUIRE = "if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return {1} end return {2}"
PLAIN_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) return {1} end return {0}"
QUEUE_ACQUIRE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return {1} end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return {1} end
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return {2}"""
QUEUE_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {0} end
local head = redis.call('LPOP', KEYS[2])
if not head then redis.call('DEL', KEYS[1]) return {1} end
redis.call('SET', KEYS[1], head, 'PX', 3000)
redis.call('PUBLISH', ARGV[2], head)
return {1}"""


@dataclass
class Replayed:
    """One contender: the messages of a version, and the connections over which they are sent again."""

    bench: Bench
    messages: Messages

    def __post_init__(self) -> None:
        self.bare, self.pushes = Bare(self.bench.path), Bare(self.bench.path)
        for channel in self.messages.channels:
            self.pushes.call("SUBSCRIBE", channel)

    def close(self) -> None:
        self.bare.close()
        self.pushes.close()

    def _drop_pushes(self) -> None:
        with suppress(BlockingIOError):
            while self.pushes.socket.recv(65536, socket.MSG_DONTWAIT):
                pass

    def micros(self, calls: list[bytes], codes: list[int]) -> float:
        """µs of the server for all these calls. They must be answered by these codes, in turn."""
        self.bare.call("CONFIG", "RESETSTAT")
        self.bare.socket.sendall(b"".join(calls))
        for i in range(len(calls)):
            reply = self.bare.receive()
            assert not isinstance(reply, Exception), reply
            assert reply[0] == codes[i % len(codes)], (reply, i)
        (calls_run, micros) = re.findall(
            rb"cmdstat_evalsha:calls=(\d+),usec=(\d+)", self.bare.call("INFO", "commandstats")
        )[0]
        assert int(calls_run) == len(calls)
        return float(micros)

    def pair(self) -> float:
        """µs of an acquire and a release of one lock, half of it."""
        acquire, release = self.messages.acquire, self.messages.release
        calls = []
        for _ in range(CALLS):
            token = fresh_token()
            calls += [acquire.packed(token), release.packed(token)]
        return self.micros(calls, [1, 1]) / len(calls)

    def halves(self) -> tuple[float, float]:
        """µs of an acquire, and of a release: a hundred of each, on as many locks, which were held before."""
        acquire, release = self.messages.acquire, self.messages.release
        all_of_them = [(fresh_token(), _name(i)) for i in range(CALLS)]
        taken = self.micros([acquire.packed(*each) for each in all_of_them], [1])
        return taken / CALLS, self.micros([release.packed(*each) for each in all_of_them], [1]) / CALLS

    def handover(self) -> float:
        """µs of a handover: the release, the confirming acquire, and the acquire with which another one queues."""
        messages, name = self.messages, _name(secrets.randbelow(10_000))
        tokens = [fresh_token() for _ in range(CALLS + WAITERS + 1)]
        self.bare.call("DEL", *messages.enqueue.keys(name))
        for token in tokens[: WAITERS + 1]:
            self.bare.ask(messages.enqueue.packed(token, name))
        calls = []
        for i in range(CALLS):
            calls += [
                messages.hand_over.packed(tokens[i], name),
                messages.confirm.packed(tokens[i + 1], name),
                messages.enqueue.packed(tokens[i + 1 + WAITERS], name),
            ]
        spent = self.micros(calls, [1, 1, 2])
        self._drop_pushes()
        self.bare.call("DEL", *messages.enqueue.keys(name))
        return spent / CALLS


def _name(number: int) -> str:
    return f"{NAME[:-4]}{number:04}"


def _smallest(path: str, acquire: str, release: str) -> Messages:
    bare, token = Bare(path), fresh_token()
    key, queue, channel = f"lock:smallest:{NAME}", f"queue:smallest:{NAME}", "smallest"
    shas = [str(bare.call("SCRIPT", "LOAD", script).decode()) for script in (acquire, release)]
    bare.close()
    taking = Template(["EVALSHA", shas[0], "2", key, queue, token, "30000"], token)
    leaving = Template(["EVALSHA", shas[1], "2", key, queue, token, channel], token)
    return Messages(taking, leaving, taking, leaving, taking, (channel,))


def _contenders(bench: Bench, smallest: Messages) -> tuple[dict[str, Replayed], dict[str, str]]:
    versions = {OURS: record(bench.path, str(ROOT / "src"))}
    remarks = {}
    if bench.before is not None:
        versions[BEFORE] = record(bench.path, bench.before.src)
        remarks[BEFORE] = bench.before.name
    return {name: Replayed(bench, each) for name, each in {**versions, SMALLEST: smallest}.items()}, remarks


def server_time(bench: Bench) -> Iterator[Outcome]:
    """An acquire and a release that nobody disturbs."""
    contenders, remarks = _contenders(bench, _smallest(bench.path, PLAIN_ACQUIRE, PLAIN_RELEASE))
    pairs = bench.interleave("server-time", 40, {name: each.pair for name, each in contenders.items()})
    halves: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}

    def of(name: str) -> Callable[[], float]:
        def slice_() -> float:
            halves[name].append(contenders[name].halves())
            return halves[name][-1][0]

        return slice_

    acquires = bench.interleave("server-time", 40, {name: of(name) for name in contenders})
    releases = {name: [each[1] for each in halves[name][-len(acquires[name]) :]] for name in contenders}
    for what, samples in (
        (f"acquire + release {ONE_LOCK}", pairs),
        (f"acquire {MANY_LOCKS}", acquires),
        (f"release {MANY_LOCKS}", releases),
    ):
        yield Outcome(
            "server-time", f"server's time, hot: {what}", "µs a call", OURS, samples, remarks=remarks,
            less_is_better=True,
        )  # fmt: skip
    for each in contenders.values():
        each.close()


def server_handover(bench: Bench) -> Iterator[Outcome]:
    """A handover to the next of ten waiters."""
    contenders, remarks = _contenders(bench, _smallest(bench.path, QUEUE_ACQUIRE, QUEUE_RELEASE))
    samples = bench.interleave("server-handover", 40, {name: each.handover for name, each in contenders.items()})
    for each in contenders.values():
        each.close()
    yield Outcome(
        "server-handover", "server's time, hot: a handover", "µs", OURS, samples, remarks=remarks, less_is_better=True,
        note="Release, confirming acquire, and the acquire with which another one queues; ten wait all the time.",
    )  # fmt: skip
