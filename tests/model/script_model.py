"""What the walks over scripts share: a server in memory with one name in it, its clock, and the messages to it.

Theory. The messages are those of a script's header; the server is the simulator's, under a clock that the walk moves. A
`World` says a message and then judges it from outside: by the reply, and by what is in the keys. A `Walk` is made of
messages by chance, and says some of them again: at once, or late, as a network may.
"""

from __future__ import annotations

import os
import random

from interlock._protocol.server import ServerError
from interlock._protocol.timing import TOMBSTONE_TTL
from interlock.primitives.codes import GRANTED
from interlock.primitives.scripts import load
from simulator import commands, server

ROUNDED = 0.5  # ms by which the scripts round ends and now: less than a client's margin
SOME = 32  # waiters or leases that one script call handles at most
EPOCH = b""  # the stamp of a client that has no quarantine: see message.lua
STEPS = float(os.environ.get("WALK", "1"))  # how much longer than usual each walk is
SEED = os.environ.get("WALK_SEED", "")  # a word for other walks than usual


def _hincrby(store, key, field, number):
    fields = store.collection(key, commands.Hash)
    fields[field] = b"%d" % (commands._integer(fields.get(field, b"0")) + commands._integer(number))
    return int(fields[field])


def _hset(store, key, *pairs):
    fields = store.collection(key, commands.Hash)
    new = pairs[::2]
    count = sum(field not in fields for field in new)
    fields.update(zip(new, pairs[1::2], strict=True))
    return count


def _hmget(store, key, *names):
    fields = store.find(key, commands.Hash) or {}
    return [fields.get(name, False) for name in names]


def _zrangebyscore(store, key, least, most, *limit):
    scores = store.find(key, commands.ZSet) or {}

    def inside(score):
        above = score > float(least[1:]) if least[:1] == b"(" else score >= float(least)
        return above and (score < float(most[1:]) if most[:1] == b"(" else score <= float(most))

    chosen = [each for each in store.ordered(key) if inside(scores[each])]
    return chosen[int(limit[1]) :][: int(limit[2])] if limit else chosen


MORE = {b"HINCRBY": _hincrby, b"HSET": _hset, b"HMGET": _hmget, b"ZRANGEBYSCORE": _zrangebyscore}


def _counted(command):
    """The same command: it counts the calls that a real server copies to its replicas, even if they change nothing."""

    def run(store, *args):
        reply = command(store, *args)
        store.copied = getattr(store, "copied", 0) + bool(reply)
        return reply

    return run


def able(monkeypatch):
    """A fixture: the simulator's server has the commands of `MORE`, and counts the writes that replicas get."""
    for name in (b"SET", b"PEXPIRE"):
        monkeypatch.setitem(commands.COMMANDS, name, _counted(commands.COMMANDS[name]))
    for name, made in MORE.items():
        monkeypatch.setitem(commands.COMMANDS, name, made)
    monkeypatch.setattr(server, "TAKE_MEMORY", server.TAKE_MEMORY | {b"HINCRBY"})
    monkeypatch.setattr(server, "WRITES", server.WRITES | {b"HINCRBY"})


class World:
    """A server, and the keys of one script in it. Subclasses say what is seen there, and what is right."""

    grants_leases = True  # False: acks= does not apply to what an acquire grants

    def __init__(self, script, keys):
        self.clock = 0.0
        self.keys = keys
        self.server = server.Server(lambda: self.clock)
        self.source = load(script).source
        self.dumb = set()  # channels that nobody hears
        self.server.subscribers = lambda channel: int(channel not in self.dumb)
        self.pushes = []
        self.server.publish = lambda channel, payload: self.pushes.append((channel, payload)) or 1
        self.log = []

    def say(self, verb, *args, keys=None, script=None):
        """Send this message. Fails if a rule is broken. Returns the reply, or a ServerError."""
        args = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
        self.server.read_clock()
        before = self.see()
        self.log.append((round(self.clock, 4), verb, *args))
        self.server.copied = 0
        source = load(script).source if script else self.source
        reply = self.server.eval(source, keys or self.keys, [verb.encode(), *args, EPOCH])
        try:
            assert not isinstance(reply, ServerError) or self.excused(reply), f"an error: {reply}"
            self.nothing_eternal()
            granted = verb == "acquire" and not isinstance(reply, ServerError) and reply[0] == GRANTED
            if granted and self.grants_leases:
                assert self.server.copied, "granted without a write: WAIT would count replicas that lack the grant"
            self.judge(verb, args, reply, before)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\nat message {len(self.log)}, the last: {self.log[-12:]} -> {reply}"
            ) from None
        return reply

    def see(self):
        """What judge() has to know from before a message."""

    def judge(self, verb, args, reply, before):
        """Fails if this message did what it must not."""

    def excused(self, error):
        return self.server.full and str(error).startswith("OOM")

    def nothing_eternal(self):
        for key in self.server.data:
            assert key in self.server.expires, f"{key} has no TTL"

    def look(self, key):
        """The value of a key, if it is alive."""
        self.server.read_clock()
        self.server.purge(key)
        return self.server.data.get(key)

    @property
    def now(self):
        """The server's time, in ms."""
        self.server.read_clock()
        return self.server.micros / 1000

    def image(self):
        """All that is there."""
        self.server.purge_all()
        return {key: dict(value) if isinstance(value, dict) else value for key, value in self.server.data.items()}

    def blind(self):
        """Judge no further message: from here on keys vanish, so the rules do not hold step by step. Returns itself."""
        self.judge = lambda *_: None
        return self


class Walk:
    """Messages by chance."""

    def __init__(self, world, *seed):
        self.random = random.Random(" ".join(map(str, seed)) + SEED)
        self.world = world
        self.sent = []
        self.number = 0

    def run(self, steps):
        """So many steps, or as many times more as $WALK says."""
        for _ in range(int(steps * STEPS)):
            self.step()
        return self.world

    def step(self):
        """Do something."""
        raise NotImplementedError

    def say(self, verb, *args, again=0.1, **where):
        """Say it, sometimes twice; and remember it."""
        self.sent.append((self.world.clock, verb, args, where))
        reply = self.world.say(verb, *args, **where)
        if self.random.random() < again:
            self.world.say(verb, *args, **where)
        return reply

    def late(self, most=300):
        """Say again what was said before, if a copy may still be on its way."""
        then, verb, args, where = self.random.choice(self.sent[-most:] or [(-TOMBSTONE_TTL, "", (), {})])
        if self.world.clock - then < TOMBSTONE_TTL and self.possible(verb, args):
            self.world.say(verb, *args, **where)

    def possible(self, verb, args):
        """Whether a copy of this message may be on its way: only a message in doubt has copies."""
        return True

    def pass_time(self, *seconds):
        """Let one of these times pass, in seconds."""
        self.world.clock = round(self.world.clock + self.random.choice(seconds), 3)
