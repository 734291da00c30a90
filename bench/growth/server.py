"""What crowds cost the server: its time in scripts (INFO commandstats, hot), and its memory.

Messages stand for clients; in `connections` each comes over a connection of its own.
"""

from __future__ import annotations

import random
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis

from checkouts import fresh_token
from floor import Bare
from growth.curves import Costs
from interlock._client.renewal import RENEWAL_BATCH
from interlock._client.waiting import HEARTBEAT_BATCH
from interlock.primitives.codes import GRANTED, QUEUED
from interlock.primitives.lock import lock_resource
from interlock.primitives.permits import read_resource, semaphore_resource, write_resource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from growth.sender import Sender
    from interlock._protocol.resource import Resource

CALLS = 100  # of each kind, of which a mean is taken
FEW_WAITERS = 10
TIMES = 10_000  # of each kind, so that INFO cpu, which counts in ms, is exact enough
CROWD = 10  # connections on one lock
FEWEST_FOR_MEMORY = 1000  # names: with fewer, other things outweigh them in used_memory

# The names of the series, which the tables show and the model reads.
HANDOVER = "a handover: release, confirmation, next acquire"
QUEUE_UP, GIVE_UP = "one more that queues", "one that gives up"
BEAT_CORE, HANDOVER_CORE = "a heartbeat, with system calls", "a handover and its push, with system calls"
BEAT_ALL, BEAT_ONE = f"heartbeat of a waiter, up to {HEARTBEAT_BATCH} in a message", "heartbeat of one waiter"
PAIR, RENEWAL = "one more: acquire and release", f"renewal of a lease, up to {RENEWAL_BATCH} in a message"
ENTER = "a reader that enters when a writer leaves"
BYTES_WAITER, BYTES_HOLDER = "memory of a waiter", "memory of a holder"
BYTES_HELD, BYTES_FREE = "memory of a held lock", "memory of a lock used in the last 5 minutes"
BYTES_NEW = "memory of a new client: connection, subscription, place in a queue"
BYTES_QUEUE = "memory of a lock's queue of one waiter"


def _name() -> str:
    return f"growth {secrets.token_hex(4)}"


def _handovers(sender: Sender, resource: Resource, holder: str, waiting: Sequence[str]) -> float:
    """µs of a handover: a release, the confirming acquire, and the acquire with which another one queues."""
    queue, messages = deque(waiting), []
    for _ in range(CALLS):
        queue.append(fresh_token())
        successor = queue.popleft()
        messages += [
            sender.release(resource, holder), sender.acquire(resource, successor), sender.acquire(resource, queue[-1]),
        ]  # fmt: skip
        holder = successor
    spent = sender.micros(messages, [1, GRANTED, QUEUED])
    sender.drop_pushes()
    return spent / CALLS


def _heartbeats(sender: Sender, resource: Resource, tokens: Sequence[str]) -> float:
    batches = [tokens[i : i + HEARTBEAT_BATCH] for i in range(0, len(tokens), HEARTBEAT_BATCH)]
    return sender.micros([sender.heartbeat(resource, batch) for batch in batches]) / len(tokens)


def _renewals(sender: Sender, resources: Sequence[Resource], tokens: Sequence[str]) -> float:
    messages = [
        sender.renew(resources[i : i + RENEWAL_BATCH], tokens[i : i + RENEWAL_BATCH])
        for i in range(0, len(tokens), RENEWAL_BATCH)
    ]
    return sender.micros(messages) / len(tokens)


def _pairs(sender: Sender, resource: Resource) -> float:
    tokens = [fresh_token() for _ in range(CALLS)]
    messages = [message(resource, token) for token in tokens for message in (sender.acquire, sender.release)]
    return sender.micros(messages, [GRANTED, 1]) / CALLS


def _forget(sender: Sender, *resources: Resource) -> None:
    for resource in resources:
        sender.bare.call("UNLINK", *map(str, resource.keys))


def waiters(sender: Sender, size: int) -> Costs:
    """So many that wait for one lock, all of clients of their own."""
    lock = lock_resource(_name(), "lock:")
    (holder,) = sender.hold(lock, 1)
    empty = sender.bytes_of(lock)
    tokens = sender.queue(lock, size)
    memory = (sender.bytes_of(lock) - empty) / size
    more = [fresh_token() for _ in range(CALLS)]
    costs: Costs = {
        QUEUE_UP: sender.micros([sender.acquire(lock, token) for token in more], [QUEUED]) / CALLS,
        GIVE_UP: sender.micros([sender.release(lock, token) for token in more], [0]) / CALLS,
        BEAT_ALL: _heartbeats(sender, lock, tokens),
        BEAT_ONE: sender.micros([sender.heartbeat(lock, [random.choice(tokens)]) for _ in range(CALLS)]) / CALLS,
        HANDOVER: _handovers(sender, lock, holder, tokens),
        BYTES_WAITER: memory,
    }
    _forget(sender, lock)
    return costs


def permits(sender: Sender, size: int) -> Costs:
    """A semaphore of so many permits, all of them held but the last."""
    semaphore = semaphore_resource(_name(), "lock:", size)
    tokens = sender.hold(semaphore, size - 1)
    costs: Costs = {PAIR: _pairs(sender, semaphore), RENEWAL: _renewals(sender, [semaphore] * len(tokens), tokens)}
    (holder,) = sender.hold(semaphore, 1)
    costs[BYTES_HOLDER] = sender.bytes_of(semaphore) / size
    costs[HANDOVER] = _handovers(sender, semaphore, holder, sender.queue(semaphore, FEW_WAITERS))
    _forget(sender, semaphore)
    return costs


def readers(sender: Sender, size: int) -> Costs:
    """So many readers: they hold the lock; and they wait for a writer, and enter together."""
    name = _name()
    reader, writer = read_resource(name, "lock:"), write_resource(name, "lock:")
    tokens = sender.hold(reader, size)
    costs: Costs = {
        PAIR: _pairs(sender, reader),
        RENEWAL: _renewals(sender, [reader] * size, tokens),
        BYTES_HOLDER: sender.bytes_of(reader) / size,
    }
    _forget(sender, reader)
    (holder,) = sender.hold(writer, 1)
    sender.queue(reader, size)
    sender.send([sender.release(writer, holder)], [1])
    costs[ENTER] = sender.per_push(lambda woken: [sender.acquire(reader, token) for token in woken], size) / size
    _forget(sender, reader)
    return costs


def names(sender: Sender, size: int) -> Costs:
    """So many locks, each held, each with one waiter."""
    base = _name()
    locks = [lock_resource(f"{base} {i}", "lock:") for i in range(size)]
    some = random.sample(locks, min(size, 10 * CALLS))
    for lock in locks[:1]:  # the server learns the script
        _forget(sender, *[lock for _ in sender.hold(lock, 1)])
    used = [sender.used_memory()]
    holders, queued = [fresh_token() for _ in locks], [fresh_token() for _ in locks]
    sender.send([sender.acquire(*each) for each in zip(locks, holders, strict=True)], [GRANTED])
    used.append(sender.used_memory())
    costs: Costs = {RENEWAL: _renewals(sender, locks, holders)}
    sender.send([sender.acquire(*each) for each in zip(locks, queued, strict=True)], [QUEUED])
    used.append(sender.used_memory())
    of = dict(zip(locks, zip(holders, queued, strict=True), strict=True))
    costs[BEAT_ONE] = sender.micros([sender.heartbeat(lock, of[lock][1:]) for lock in some]) / len(some)
    steps = [
        [sender.release(lock, of[lock][0]), sender.acquire(lock, of[lock][1]), sender.acquire(lock, fresh_token())]
        for lock in some
    ]
    costs[HANDOVER] = sender.micros([each for step in steps for each in step], [1, GRANTED, QUEUED]) / len(some)
    sender.drop_pushes()
    if size >= FEWEST_FOR_MEMORY:
        costs[BYTES_HELD] = (used[1] - used[0]) / size
        costs[BYTES_QUEUE] = (used[2] - used[1]) / size
        for lock in locks:
            sender.bare.call("UNLINK", *map(str, [lock.keys[0], *lock.keys[2:]]))  # all but the record
        costs[BYTES_FREE] = (sender.used_memory() - used[0]) / size
    _forget(sender, *locks)
    return costs


class Link:
    """A connection of a waiter of its own, which also receives its pushes."""

    def __init__(self, sender: Sender, path: str, lock: Resource, number: int) -> None:
        self.bare, self.token, self.channel = Bare(path), fresh_token(), f"{sender.channel}:{number:05}"
        self.bare.call("HELLO", "3")
        self.bare.call("SUBSCRIBE", self.channel)
        self.acquire = sender.acquire(lock, self.token, self.channel)
        self.release = sender.release(lock, self.token)
        self.beat = sender.heartbeat(lock, [self.token])

    def send(self, message: bytes) -> None:
        self.bare.socket.sendall(message)

    def reply(self) -> Any:
        """The next reply, which is no push."""
        while isinstance(reply := self.bare.receive(), hiredis.PushNotification):
            pass
        assert not isinstance(reply, Exception), reply
        return reply


class Crowds:
    """So many connections, ten on each lock, whose first link holds it. All locks are at work at once."""

    def __init__(self, sender: Sender, path: str, size: int) -> None:
        self.locks: list[deque[Link]] = []
        for first in range(0, size, CROWD):
            lock = lock_resource(_name(), "lock:")
            links = deque(Link(sender, path, lock, number) for number in range(first, first + CROWD))
            for i, link in enumerate(links):
                link.send(link.acquire)
                assert link.reply()[0] == (QUEUED if i else GRANTED)
            self.locks.append(links)
        self.waiting = [link for links in self.locks for link in list(links)[1:]]

    def heartbeats(self) -> int:
        """One of each waiter. How many these were."""
        for link in self.waiting:
            link.send(link.beat)
        for link in self.waiting:
            assert link.reply()[2] == QUEUED
        return len(self.waiting)

    def handovers(self) -> int:
        """One of each lock. How many these were."""
        self._all([links[0] for links in self.locks], "release", 1)
        for links in self.locks:
            links.rotate(-1)
        self._all([links[0] for links in self.locks], "acquire", GRANTED)
        self._all([links[-1] for links in self.locks], "acquire", QUEUED)
        return len(self.locks)

    @staticmethod
    def _all(links: list[Link], message: str, code: int) -> None:
        for link in links:
            link.send(getattr(link, message))
        for link in links:
            assert link.reply()[0] == code

    def close(self) -> None:
        for links in self.locks:
            for link in links:
                link.bare.close()


def connections(sender: Sender, path: str, size: int) -> Costs:
    """So many connections: heartbeats, then handovers, as the server's processor time."""
    before = sender.used_memory()
    crowds, costs = Crowds(sender, path, size), Costs()
    costs[BYTES_NEW] = (sender.used_memory() - before) / size
    for cost, work in ((BEAT_CORE, crowds.heartbeats), (HANDOVER_CORE, crowds.handovers)):
        used, done = sender.core_seconds(), 0
        while done < TIMES:
            done += work()
        costs[cost] = (sender.core_seconds() - used) / done * 1e6
    crowds.close()
    return costs
