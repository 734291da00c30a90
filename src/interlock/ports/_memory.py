"""What a client remembers of a server: under which identity it met it, and so whether leases may have been lost.

Theory. A server that restarted, or a replica that took over, may have lost the last grants. Its identity tells: the
process (run_id) and its history of writes (master_replid). We read it once, with the greeting of each connection, which
ends with the server's process; and send it with every message as the *epoch* (see barred() in queue.lua). The scripts
write it beside each lock, so another one there starts the quarantine of that lock. What no record tells, the client's
own memory does: the identity that it met before.

Rules.
 1. How long: from when this identity began at the latest. A process that never was a replica began with its start;
    for one that was promoted we only know since when we have known it.
 2. The same process without a second replid has lost nothing: the first replica that attaches changes its replid.
 3. Who has proof that nothing was lost (`lossless`) says so in its epoch, and its next grant renews the record.
 4. Beside a new primary the old one, cut off, may go on to grant for some seconds (`longer`) what runs out there. Until
    these are over, what the new one confirms or renews counts for nothing yet (`unsettled`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from interlock._core import log

if TYPE_CHECKING:
    from interlock.connect import Address

SHORT: Final = 12  # characters of run_id and replid: enough to tell servers apart
NO_REPLID: Final = "0" * 40
PATIENCE: Final = 2.0  # seconds that one step of a proof may take
HASTE: Final = 0.2  # and when its caller's time is over
STEPS: Final = 3  # that it has, at most, of about so long
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
ASKED: Final = (("INFO", "server"), ("INFO", "replication"), ("TIME",))


def now() -> float:
    """Seconds on the clock that nobody sets and that runs on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


class Facts(NamedTuple):
    """Who a server is."""

    run_id: str
    replid: str
    replid2: str
    uptime: float
    """Whole seconds, and up to one more than it is: the difference of two rounded times."""
    now_ms: int
    """Its clock."""
    replicas: int
    """How many are connected to it."""

    @property
    def identity(self) -> str:
        """The process, and its history of writes."""
        return f"{self.run_id[:SHORT]}:{self.replid[:SHORT]}"

    @property
    def promoted(self) -> bool:
        """Whether it was a replica once."""
        return self.replid2 not in ("", NO_REPLID)


def fields(info: Any) -> dict[str, str]:
    """The reply to INFO."""
    text: str = info.decode(errors="replace") if isinstance(info, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def facts(server: Any, replication: Any, time: Any) -> Facts | None:
    """What the replies to `ASKED` tell; None if one was refused, or does not tell who the server is."""
    if not (isinstance(server, bytes) and isinstance(replication, bytes) and isinstance(time, list)):
        return None
    info = fields(server) | fields(replication)
    if min(len(info.get("run_id", "")), len(info.get("master_replid", ""))) < SHORT:
        return None
    seconds, micros = cast("list[bytes]", time)
    return Facts(
        info["run_id"],
        info["master_replid"],
        info.get("master_replid2", ""),
        float(info.get("uptime_in_seconds", 0)),
        int(seconds) * 1000 + int(micros) // 1000,
        int(info.get("connected_slaves", 0)),
    )


class Story(NamedTuple):
    """How a slot of a cluster came to the node that serves it now."""

    former: str
    """The identity under which it was served, if something may have been lost since then; else "-"."""
    at: float
    """When, by our clock: no lease of before is younger."""
    fine: tuple[str, ...]
    """The identities of those from whom it came without loss."""


class Epoch:
    """What goes out with every message to a server under one identity."""

    __slots__ = ("_texts", "facts", "fine", "former", "longer", "mark", "met", "since", "stories", "text", "wait")

    def __init__(self, facts: Facts | None, wait: float | None, former: str, mark: str, longer: float = 0.0) -> None:
        self.facts = facts
        self.wait = None if wait is None else wait + longer  # seconds of quarantine; None: there is none
        self.longer = 0.0 if wait is None else longer  # of them, those for which another one may still grant
        self.former = former
        self.mark = mark
        self.fine: list[str] = []
        self.met = now()
        self.stories: dict[int, Story] = {}  # of slots that were elsewhere before
        self._texts: dict[int, str] = {}
        self.since = 0
        if facts is not None:
            self.since = facts.now_ms - (0 if facts.promoted else int(max(0, facts.uptime - 1) * 1000))
            if not facts.promoted:
                self.fine.append(facts.run_id[:SHORT] + ":")
        self.text = ""
        self.write()

    @property
    def identity(self) -> str:
        """Of the server; "" if nobody may know."""
        return self.facts.identity if self.facts else ""

    def history(self) -> str:
        """What was before: the identity that the client knew, and those that are fine."""
        return " ".join([self.former, *self.fine])

    @property
    def began(self) -> float:
        """When, at the latest, by our clock."""
        assert self.facts is not None
        return self.met - (self.facts.now_ms - self.since) / 1000

    @property
    def bars(self) -> bool:
        """Whether what was lost before it may still last, and nothing proves that there is no such thing."""
        if self.facts is None or self.wait is None or self.former == "-":
            return False
        return now() < self.began + self.wait

    def unsettled(self, slot: int = -1) -> str:
        """Who was here before, and may still grant beside this one; "" if nobody."""
        if not self.longer:
            return ""
        former, at, _ = self.story(slot)
        return former if former != "-" and now() < at + self.longer else ""

    def story(self, slot: int) -> Story:
        """What is known of a slot here."""
        began = self.began
        former, at, fine = self.stories.get(slot) or Story(self.former, began, ())
        fine = (*self.fine, *fine)
        return Story("-" if any(former.startswith(each) for each in fine) else former, at, fine)

    def tell(self, slot: int, story: Story) -> None:
        """How this slot came here."""
        self.stories[slot] = story
        self._texts.pop(slot, None)

    def of(self, slot: int) -> str:
        """The text for messages about a slot."""
        if slot not in self.stories or self.facts is None or self.wait is None:
            return self.text
        text = self._texts.get(slot)
        if text is None:
            former, at, fine = self.story(slot)
            since = self.facts.now_ms + int((at - self.met) * 1000)
            history = " ".join([former, *dict.fromkeys(fine)])
            text = self._texts[slot] = f"{self.identity}{self.mark}{since} {int(self.wait * 1000)} {history}"
        return text

    def write(self) -> None:
        """Make the text anew."""
        self._texts.clear()
        if self.facts is None or self.wait is None:
            self.text = self.mark.strip()
        else:
            self.text = f"{self.identity}{self.mark}{self.since} {int(self.wait * 1000)} {self.history()}"

    def suspect(self) -> None:
        """It may have been another one before, for all that anybody here knows."""
        if self.facts is not None and self.former == "-":
            self.former = "?"
            self.write()

    def prove(self, identity: str) -> None:
        """Nothing was lost between that one and this."""
        if identity not in self.fine:
            self.fine.append(identity)
        if self.former == identity:
            self.former = "-"
        self.write()


class Memory:
    """The identities of the servers that one client met at one place: an address, or whom Sentinel names."""

    def __init__(self, wait: float | None, *, former: str = "-", mark: str = " ") -> None:
        self.wait = wait  # seconds that the longest lease lasts; None: no quarantine
        self.mark = mark  # "+" for one server of a quorum
        self.epochs: dict[str, Epoch] = {}
        self.latest = Epoch(None, wait, former, mark)
        self.before = former
        self._warned = False
        self.address: Address  # where that is
        self.known = ""  # of a node of a cluster: its identity when the map was read last
        self.replicas = 0  # the most that a server had here: one that is missing is missing

    def count(self, replication: Any) -> int:
        """How many replicas there are, by the newest INFO and those before."""
        self.replicas = max(self.replicas, int(fields(replication).get("connected_slaves", 0)))
        return self.replicas

    def meet(self, found: Facts | None, address: Address, longer: float = 0.0) -> Epoch:
        """A new connection leads to this server; an isolated primary there may be believed for so much longer."""
        if found is None:
            if self.wait is not None and not self._warned:
                self._warned = True
                log.warning(
                    "%s: INFO is refused, or tells no run_id, so a restart or failover that loses leases can't be "
                    "noticed: there is no quarantine. Give this user +info (docs/acl.md), or say quarantine=False",
                    address.shown,
                )
            return Epoch(None, self.wait, "-", self.mark)
        epoch = self.epochs.get(found.identity)
        if epoch is None:
            before = address.former if self.before == "-" else self.before
            if self.latest.bars:  # what came since may have come without loss, but not what is waited for
                before = self.latest.former
            # The one before may go on for as long as it was told to: its settings need not be those of this one.
            epoch = Epoch(found, self.wait, before, self.mark, max(longer, self.latest.longer))
            if any(before.startswith(each) for each in epoch.fine):
                epoch.former = "-"
            epoch.write()
            self.epochs[found.identity] = epoch
            if epoch.bars:
                log.warning(
                    "interlock: %s has been restarted or replaced: unless it is proven that it lost nothing, locks "
                    "that were in use are granted again in %.3g s",
                    address.shown,
                    epoch.began + (epoch.wait or 0) - now(),
                )
        self.latest, self.before = epoch, epoch.identity
        self.replicas = max(self.replicas, found.replicas)
        return epoch


class Move:
    """Slots of a cluster have gone from one node to another."""

    __slots__ = ("alive", "at", "before", "here", "known", "left")

    def __init__(self, left: Memory, here: Memory, at: float) -> None:
        self.left = left
        self.here = here
        self.before = left.latest  # the epoch under which they were served
        self.known = here.known
        self.at = at
        self.alive: bool | None = None  # whether the one that they left is still the primary that it was


class Memories:
    """Those of one Interlock: of each address that it met, in all of its loops."""

    def __init__(self, wait: float | None) -> None:
        self.wait = wait
        self._by: dict[str, Memory] = {}
        self.served: list[Memory | None] = []  # by slot of a cluster: who served it when somebody last looked
        self.moves: dict[int, list[Move]] = {}  # slots that have moved, and were not asked for since

    def of(self, address: Address, mark: str = " ") -> Memory:
        """That of this address."""
        memory = self._by.setdefault(address.shown, Memory(self.wait, mark=mark))
        memory.address = address
        return memory


def lossless(address: Address, evidence: str, epoch: Epoch, left: float = PATIENCE * STEPS) -> bool | None:
    """Whether nothing was lost between the server of that identity and the one of this epoch; None: not yet.

    A handover loses nothing if the demoted primary went on with the history of the new one; a restart, if every write
    was on the disk before it was answered, the log of them is what the server began with, and nobody promotes replicas
    there: a restart hides that this was one, which had lost something. Blocks, for about the seconds that are left to
    who asks. Only asked in a quarantine.
    """
    patience = min(PATIENCE, max(HASTE, left) / STEPS)
    now = _ask(address, patience, *ASKED[:2], ("INFO", "persistence"), ("CONFIG", "GET", "appendfsync"))
    if now is None:
        return None
    here = fields(now[0]) | fields(now[1]) | fields(now[2])
    if here.get("run_id", "")[:SHORT] != epoch.identity[:SHORT]:
        return None  # another one by now, of which nobody has asked
    second = here.get("master_replid2", NO_REPLID)
    if second == NO_REPLID:
        promotes = address.sentinels is not None or here.get("redis_mode") == "cluster"
        logged = here.get("aof_enabled") == "1" and here.get("aof_base_size", "0") != "0"  # and it began with that log
        return not promotes and logged and isinstance(now[3], list) and b"always" in now[3]
    process, _, history = evidence.partition(":")
    if second[:SHORT] != history:
        return False
    for key, value in here.items():
        if key.startswith("slave") and "ip=" in value:
            replica = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
            there = _ask(address.at(replica["ip"], int(replica["port"])), patience, *ASKED[:2])
            info = fields(there[0]) | fields(there[1]) if there else {}
            if info.get("run_id", "")[:SHORT] == process:
                return True if info.get("role") == "slave" and info.get("master_replid2") == second else None
    return None


def _ask(address: Address, patience: float, *commands: tuple[str, ...]) -> list[Any] | None:
    """The replies of a server; None if it can't be reached."""
    try:
        return ask(address, patience, *commands)
    except Exception:  # noqa: BLE001 (who asks for a proof has none, then)
        return None


def ask(address: Address, within: float, *commands: tuple[str, ...]) -> list[Any]:
    """The replies of a server, be it a replica, over a connection of redis-py. Raises what that raises; blocks."""
    from redis.exceptions import ResponseError  # noqa: PLC0415 (rarely needed)

    connection = address.connection(within)
    replies: list[Any] = []
    try:
        connection.connect()
        for command in commands:
            connection.send_command(*command)
            try:
                reply: Any = connection.read_response()
            except ResponseError as error:
                reply = error
            if hasattr(reply, "items"):  # RESP3
                reply = [part for pair in reply.items() for part in pair]
            replies.append(reply)
    finally:
        connection.disconnect()
    return replies
