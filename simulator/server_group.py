"""A server group: all processes behind one address. One is the primary; the others were it before, or replicate it.

Theory. A process is a `Host`: it has keys, a clock, and two names, which end with the process (run_id) and with the
history of its writes (replid). Clients learn facts about a host by the same commands as about a real server: `INFO`,
`TIME`, `CONFIG`. A host that replaces another starts with an *image* of the keys: all keys, the keys of some moments
ago (a snapshot, a disk that lags, a replica that lags), or no keys.

Rules.
(a) A connection ends with its host's process.
(b) An isolated primary still answers some clients, until it notices that it has no replicas. Then it refuses all
    writes, and in the end it replicates the new primary.
(c) A server of a quorum that is re-seeded closes no connection. While it replicates another server it refuses writes;
    its first replica gives the other one a new history, unless that one had a replica before.
(d) The address of a server of a quorum may lead to another one for a while.
(e) A replica replaces a primary whose machine stands still. When that machine goes on, the old primary answers the
    delayed messages and all clients that still have a connection, until it steps down and replicates the new primary.
"""

from __future__ import annotations

import hashlib
from math import floor
from typing import TYPE_CHECKING, Any, Final, Protocol

from interlock._protocol.server import ServerError
from interlock._quarantine.identity import IDENTITY_COMMANDS, NO_REPLID, PAST_COMMANDS, Facts, parse_facts
from interlock._quarantine.voter import RECORD_TTL, VoterRecord, voter_key

from .server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Self

    from .coroutines import Process
    from .scheduler import World

Image = tuple[dict[bytes, Any], dict[bytes, int]]
EMPTY: Final[Image] = ({}, {})
AGE: Final = 1e5  # seconds for which the first primary is up when the world begins
VOTER_KEY: Final = voter_key("lock:").encode()
NOREPLICAS: Final = "NOREPLICAS Not enough good replicas to write."


class Subscriber(Protocol):
    """A subscriber of a channel."""

    process: Process

    def receive_push(self, payload: bytes) -> None:
        """Take a push that has arrived."""


class Link(Protocol):
    """A connection of a client to a host."""

    @property
    def process(self) -> Process:
        """The process of the client."""
        ...

    @property
    def host(self) -> Host:
        """The host to which it leads."""
        ...

    def drop_all(self, why: str) -> None:
        """Drop the connection: the client learns that it is broken."""
        ...


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
        self.loaded = 0  # the number of keys with which it began
        self.promoted = False  # whether it was a replica before
        self.lost_data = False  # it began without some earlier writes
        self.server = Server(group.clock)
        self.server.skew = skew
        self.server.subscribers = lambda channel: int(channel in self.subscribed)
        self.server.info = lambda section: self.answer("INFO", section)
        self.alive = True
        self.refusal = ""  # if not empty, its reply to every script: an error
        self.paused = False  # its machine stands still
        self.delayed: list[Callable[[], None]] = []  # messages that arrived meanwhile
        self.replicates: Host | None = None  # its primary, if it is a replica
        self.had_replica = False  # so the next first replica changes its replid no more
        self.reachable_by: Collection[str] | None = None  # the only clients that reach this host; None: all do
        self.links: set[Link] = set()
        self.subscribed: dict[
            bytes, list[Subscriber]
        ] = {}  # by channel: two, if two clients were restored from one snapshot

    def subscribe(self, channel: bytes, subscriber: Subscriber) -> None:
        """Add a subscriber to the channel."""
        subscribers = self.subscribed.setdefault(channel, [])
        if subscriber not in subscribers:
            subscribers.append(subscriber)

    def unsubscribe(self, channel: bytes, subscriber: Subscriber) -> bool:
        """Remove a subscriber from the channel. Returns whether it was subscribed."""
        subscribers = self.subscribed.get(channel, [])
        if subscriber not in subscribers:
            return False
        subscribers.remove(subscriber)
        if not subscribers:
            del self.subscribed[channel]
        return True

    def reached_by(self, process: Process) -> bool:
        """Whether messages of this client arrive at this host."""
        return self.alive and (self.reachable_by is None or process.base in self.reachable_by)

    def attach_replica(self) -> None:
        """Note a replica. The first one begins a new history of writes."""
        if not self.had_replica:
            self.replid, self.replid2, self.had_replica = self.group.new_replid(), NO_REPLID, True

    def follow(self, source: Host) -> None:
        """Replicate another server, whose keys are not here yet: REPLICAOF."""
        self.replicates, self.server.is_replica = source, True

    def copy_keys(self, image: Image, replid: str) -> None:
        """Replace all keys by those of the primary, and go on with the history of its writes."""
        self.replid = replid
        self.server.data, self.server.expires = map(dict, image)

    def follow_nobody(self) -> None:
        """Become a primary: REPLICAOF NO ONE."""
        self.replicates, self.server.is_replica = None, False
        self.replid, self.replid2, self.promoted, self.had_replica = self.group.new_replid(), self.replid, True, True

    def load(self, image: Image) -> None:
        """Start with these keys."""
        self.loaded = len(image[0])
        self.server.data, self.server.expires = map(dict, image)

    def run(self, by_text: bool, script: str, keys: list[bytes], args: list[bytes]) -> Any:
        """Run a script."""
        if self.refusal:
            return ServerError(self.refusal)
        return (self.server.eval if by_text else self.server.evalsha)(script, keys, args)

    # Facts about the host

    def answer(self, *command: str) -> Any:
        """Return the reply to a command of a handshake or of a proof."""
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
        followers = [host for host in self.group.hosts if host.replicates is self and host.alive]
        return [
            f"role:{'slave' if self.replicates else 'master'}",
            f"connected_slaves:{len(followers)}",
            *(f"slave{i}:ip=sim,port={host.number},state=online" for i, host in enumerate(followers)),
            f"master_replid:{self.replid}",
            f"master_replid2:{self.replid2}",
        ]

    def facts(self) -> Facts:
        """Return the facts that a connection learns in its handshake."""
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
        self.promotes = False  # whether replicas take over, so that clients ask others for the primary
        self.reachable = True  # whether the primary accepts connections
        self.resets = True  # whether messages to a dead process get a reset, since its machine is up
        self.leads_to: ServerGroup | None = None  # the group whose server answers at this address in place of its own
        self.hosts: list[Host] = []
        self._replid_count = 0
        self.primary = self.new_host(up=AGE)

    def clock(self) -> float:
        """Return the seconds since the world began, by the clock of this group."""
        return self.offset + self.world.now * self.rate

    def name_of(self, what: str) -> str:
        """Return 40 characters for this word, different in every group."""
        return hashlib.sha1(f"{self.name} {what}".encode()).hexdigest()  # noqa: S324 (no secret)

    def new_replid(self) -> str:
        """Return a name for a new history of writes."""
        self._replid_count += 1
        return self.name_of(f"history {self._replid_count}")

    def new_host(self, *, up: float = 0.0, skew: float = 0.0) -> Host:
        """Start a new process."""
        self.hosts.append(Host(self, len(self.hosts), self.new_replid(), up=up, skew=skew))
        return self.hosts[-1]

    def route(self, process: Process) -> Host | None:
        """Return the host that accepts a new connection of this client; None if no host does."""
        if self.leads_to is not None:
            return self.leads_to.route(process)
        for host in reversed(self.hosts[-3:-1]):
            if host.reachable_by is not None and not host.replicates and host.reached_by(process):
                return host
        return self.primary if self.reachable else None

    def has_served_for_long(self, max_ttl: float) -> None:
        """Write the voter record of a server of a quorum that clients reached long ago."""
        server, long_ago = self.primary.server, self.primary.server.read_clock() - round(AGE * 1000)
        server.data[VOTER_KEY] = VoterRecord(self.primary.replid, long_ago, round(max_ttl * 1000)).encode().encode()
        server.expires[VOTER_KEY] = server.now_ms + round(RECORD_TTL * 1000)

    @property
    def isolated(self) -> bool:
        """Whether an old primary serves beside the new one."""
        return any(host.reachable_by is not None and not host.refusal for host in self.hosts[-3:])

    @property
    def scripts(self) -> int:
        """The number of scripts that all hosts ran."""
        return sum(host.server.scripts for host in self.hosts)

    # The address, with the methods that `least_lossless_ttl` needs

    def seen_by(self, process: Process) -> Address:
        """Return the address as this client reaches it."""
        return Address(self, process, None)


class Address:
    """The part of `interlock._connect.address.Address` that a proof needs."""

    display_url = ServerGroup.display_url

    def __init__(self, group: ServerGroup, process: Process, host: Host | None) -> None:
        self.group, self.process, self._host = group, process, host
        self._replies: list[Any] = []

    def at(self, _host: str, port: int) -> Address:
        """Return the address of a replica."""
        return Address(self.group, self.process, self.group.hosts[port])

    def connection(self, _within: float) -> Self:
        """Return a connection like one of redis-py: this object is one, too."""
        return self

    def connect(self) -> None:
        """Connect, without any delay."""
        self._host = self._host or self.group.route(self.process)
        if self._host is None or not self._host.alive:
            raise ConnectionError

    def send_command(self, *command: str) -> None:
        """Send a command, and store its reply."""
        assert self._host is not None
        self._replies.append(self._host.answer(*command))

    def read_response(self) -> Any:
        """Return the next reply."""
        return self._replies.pop(0)

    def disconnect(self) -> None:
        """Close the connection."""
