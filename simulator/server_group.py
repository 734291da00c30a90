"""A group: what one address leads to. One process serves there at a time; others served before, or follow it.

Theory. A process is a `Host`: it has keys, a clock, and a name that ends with it (run_id), and counts its writes under
another one (replid). What clients learn of it is what the real ports ask, word for word: `INFO`, `TIME`, `CONFIG`.
A host that comes instead of another starts with an *image* of the keys: all of them, those of some moments ago (a
snapshot, a disk that lags, a replica that lags), or none.

Rules. (1) A connection ends with its host's process. (2) An isolated primary still answers some clients, until it finds
that it has no replicas; then it refuses, and in the end it follows the new one. (3) A primary whose machine stands
still is replaced. When it goes on it answers what has come meanwhile, and serves whoever has a connection to it, until
it finds the same.
"""

from __future__ import annotations

import hashlib
from math import floor
from typing import TYPE_CHECKING, Any, Final

from interlock._protocol.types import ServerError
from interlock._quarantine.identity import IDENTITY_COMMANDS, NO_REPLID, PAST_COMMANDS, Facts, parse_facts

from .server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Self

    from .coroutines import Process
    from .network import Subscriber
    from .scheduler import World
    from .sim_server import Link

Image = tuple[dict[bytes, Any], dict[bytes, int]]
EMPTY: Final[Image] = ({}, {})
AGE: Final = 1e5  # seconds for which a replica is up when it is promoted
READONLY: Final = "READONLY You can't write against a read only replica."
NOREPLICAS: Final = "NOREPLICAS Not enough good replicas to write."


class Host:
    """One process of a server."""

    def __init__(self, group: ServerGroup, number: int, replid: str, *, up: float = 0.0, skew: float = 0.0) -> None:
        self.group = group
        self.number = number
        self.run_id = group.name_of(f"process {number}")
        self.replid = replid
        self.replid2 = NO_REPLID
        self.began = group.clock() - up
        self.since = group.world.now
        self.loaded = 0  # keys with which it began
        self.promoted = False  # it was a replica, which gets its keys from its primary
        self.lost_data = False  # it came up without all that was written before
        self.server = Server(group.clock)
        self.server.skew = skew
        self.alive = True
        self.refuses = ""  # the error that it answers everything with
        self.paused = False  # its machine stands still
        self.delayed: list[Callable[[], None]] = []  # what has come meanwhile
        self.follows: Host | None = None  # its primary, if it is a replica
        self.answers: Collection[str] | None = None  # the only clients that reach it; None: all
        self.links: set[Link] = set()
        self.subscribed: dict[bytes, list[Subscriber]] = {}  # who hears a channel here: two, if both have one memory

    def subscribe(self, channel: bytes, subscriber: Subscriber) -> None:
        """This one hears the channel from now on."""
        subscribers = self.subscribed.setdefault(channel, [])
        if subscriber not in subscribers:
            subscribers.append(subscriber)

    def unsubscribe(self, channel: bytes, subscriber: Subscriber) -> bool:
        """This one hears it no more: whether it did."""
        subscribers = self.subscribed.get(channel, [])
        if subscriber not in subscribers:
            return False
        subscribers.remove(subscriber)
        if not subscribers:
            del self.subscribed[channel]
        return True

    def reached_by(self, process: Process) -> bool:
        """Whether what this process says arrives here."""
        return self.alive and (self.answers is None or process.base in self.answers)

    def load(self, image: Image) -> None:
        """Begin with these keys."""
        self.loaded = len(image[0])
        self.server.data, self.server.expires = map(dict, image)

    def run(self, by_text: bool, script: str, keys: list[bytes], args: list[bytes]) -> Any:
        """A script call."""
        if self.refuses:
            return ServerError(self.refuses)
        return (self.server.eval if by_text else self.server.evalsha)(script, keys, args)

    # What it says of itself

    def answer(self, *command: str) -> Any:
        """Its reply to what a connection or a proof asks."""
        match command:
            case ("INFO", "server"):
                skew = self.server.skew
                up = floor(self.group.clock() + skew) - floor(self.began + skew)  # as servers count
                return f"# Server\r\nrun_id:{self.run_id}\r\nuptime_in_seconds:{up}\r\n".encode()
            case ("INFO", "replication"):
                return "\r\n".join(self._replication()).encode()
            case ("INFO", "persistence"):
                return b"rdb_last_load_keys_loaded:%d\r\nrdb_last_load_keys_expired:0\r\n" % self.loaded
            case ("INFO", "stats"):
                return b"total_net_repl_input_bytes:%d\r\n" % self.promoted
            case ("INFO", "keyspace"):
                return b""
            case ("TIME",):
                self.server.read_clock()
                seconds, micros = divmod(self.server.micros, 1_000_000)
                return [b"%d" % seconds, b"%d" % micros]
            case _:
                raise AssertionError(command)

    def _replication(self) -> list[str]:
        followers = [host for host in self.group.hosts if host.follows is self and host.alive]
        return [
            f"role:{'slave' if self.follows else 'master'}",
            f"connected_slaves:{len(followers)}",
            *(f"slave{i}:ip=sim,port={host.number},state=online" for i, host in enumerate(followers)),
            f"master_replid:{self.replid}",
            f"master_replid2:{self.replid2}",
        ]

    def facts(self) -> Facts:
        """What a connection learns with its greeting."""
        found = parse_facts(*(self.answer(*command) for command in (*IDENTITY_COMMANDS, *PAST_COMMANDS)))
        assert found is not None
        return found


class ServerGroup:
    """One address, and the hosts behind it."""

    display_url = "sim://"

    def __init__(self, world: World, name: str = "", *, offset: float = 0.0, rate: float = 1.0) -> None:
        self.world = world
        self.name = name
        self.offset, self.rate = offset, rate  # of its clock
        self.promotes = False  # whether replicas take over: others are asked who the primary is
        self.reachable = True  # a process is listening
        self.resets = True  # whoever sends to a process that has ended is told so, since its machine lives on
        self.on_new_host: Callable[[Host], None] = lambda _host: None
        self.hosts: list[Host] = []
        self._replid_count = 0
        self.primary = self.new_host(up=AGE)

    def clock(self) -> float:
        """Seconds on its clock since the world began."""
        return self.offset + self.world.now * self.rate

    def name_of(self, what: str) -> str:
        """40 characters that nobody else has."""
        return hashlib.sha1(f"{self.name} {what}".encode()).hexdigest()  # noqa: S324 (no secret)

    def new_replid(self) -> str:
        """A new name for what is written from now on."""
        self._replid_count += 1
        return self.name_of(f"history {self._replid_count}")

    def new_host(self, *, up: float = 0.0, skew: float = 0.0) -> Host:
        """A process that comes up."""
        self.hosts.append(Host(self, len(self.hosts), self.new_replid(), up=up, skew=skew))
        self.on_new_host(self.hosts[-1])
        return self.hosts[-1]

    def route(self, process: Process) -> Host | None:
        """Whom a new connection of this process meets; None: nobody listens."""
        for host in reversed(self.hosts[-3:-1]):
            if host.answers is not None and not host.follows and host.reached_by(process):
                return host
        return self.primary if self.reachable else None

    @property
    def isolated(self) -> bool:
        """Whether an old primary serves beside the new one."""
        return any(host.answers is not None and not host.refuses for host in self.hosts[-3:])

    @property
    def scripts(self) -> int:
        """How many were run."""
        return sum(host.server.scripts for host in self.hosts)

    # As ports know an address: what `least_lossless_ttl` needs of it

    def seen_by(self, process: Process) -> Address:
        """The address, as this process reaches it."""
        return Address(self, process, None)


class Address:
    """See `interlock.connect.Address`: what a proof needs of it."""

    display_url = ServerGroup.display_url

    def __init__(self, group: ServerGroup, process: Process, host: Host | None) -> None:
        self.group, self.process, self._host = group, process, host
        self._replies: list[Any] = []

    def at(self, _host: str, port: int) -> Address:
        """A replica."""
        return Address(self.group, self.process, self.group.hosts[port])

    def connection(self, _within: float) -> Self:
        """A connection of redis-py, which is this, too."""
        return self

    def connect(self) -> None:
        """It answers all at once."""
        self._host = self._host or self.group.route(self.process)
        if self._host is None or not self._host.alive:
            raise ConnectionError

    def send_command(self, *command: str) -> None:
        """A command, and its reply."""
        assert self._host is not None
        self._replies.append(self._host.answer(*command))

    def read_response(self) -> Any:
        """The next reply."""
        return self._replies.pop(0)

    def disconnect(self) -> None:
        """It ends."""
