"""What a client remembers of a server: under which identity it met it, and so whether leases may have been lost.

Theory. A server that restarted, or a replica that took over, may have lost the last grants. Its identity tells: the
process (run_id) and its history of writes (master_replid). We read it once, with the greeting of each connection, which
ends with the server's process; and send it with every message as the *epoch* (see quarantine_left() in queue.lua). The
scripts write it beside each lock, so another one there starts the quarantine of that lock. What no record tells, the
client's own memory does: the identity that it met before.

Rules.
 1. How long: from when this identity began at the latest. A process that never was a replica began with its start;
    for one that was promoted we only know since when we have known it.
 2. The same process without a second replid has lost nothing: the first replica that attaches changes its replid.
 3. Who has proof that nothing was lost (`lossless`) says so in its epoch, and its next grant renews the record. What a
    server says of its settings proves nothing: they may have been others before.
 4. Beside a new primary the old one, cut off, may go on to grant for some seconds (`longer`) what runs out there. Until
    these are over, what the new one confirms or renews counts for nothing yet (`unsettled`).
 5. A young process that began with keys may lack the newest names: to a client that knows of no process before it, that
    is evidence of one (`suspect`).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from interlock._core import DRIFT, GRANT_LIFE, log

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from interlock.connect import Address

SHORT: Final = 12  # characters of run_id and replid: enough to tell servers apart
NO_REPLID: Final = "0" * 40
PATIENCE: Final = 2.0  # seconds that one step of a proof may take
HASTE: Final = 0.2  # and when its caller's time is over
STEPS: Final = 3  # that it has, at most, of about so long
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
ASKED: Final = (("INFO", "server"), ("INFO", "replication"), ("TIME",))
PAST: Final = (("INFO", "persistence"), ("INFO", "keyspace"), ("INFO", "stats"))  # with which keys a process began
LOOKS: Final = 8  # at a server's clock, of which the one counts that took the shortest time
MOST: Final = 12  # identities from which a server has all: who came and went before is of no account
SAME: Final = 0.0005  # seconds: half of what the shortest lease ends sooner for its holder than for the server
_REPLACED: Final = (
    "interlock: %s has been restarted or replaced, and may have lost leases: unless it is proven that it lost none, "
    "locks that it has not granted since are granted in %.3g s. docs/failover.md says how to make restarts short"
)
_STARTED: Final = (
    "interlock: %s was started with the keys of a snapshot or a log, which may lack the newest leases: locks that it "
    "has not granted itself since are granted in %.3g s. docs/failover.md says how to make restarts short"
)


def now() -> float:
    """Seconds on the clock that nobody sets and that runs on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def identity_of(info: dict[str, str]) -> str:
    """The process, and its history of writes, by its INFO."""
    return f"{info.get('run_id', '')[:SHORT]}:{info.get('master_replid', '')[:SHORT]}"


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
    loaded: bool = False
    """Whether its process began with keys of a snapshot or a log, which may lack the newest."""

    @property
    def identity(self) -> str:
        """The process, and its history of writes."""
        return identity_of({"run_id": self.run_id, "master_replid": self.replid})

    @property
    def promoted(self) -> bool:
        """Whether it was a replica once."""
        return self.replid2 not in ("", NO_REPLID)


def fields(info: Any) -> dict[str, str]:
    """The reply to INFO."""
    text: str = info.decode(errors="replace") if isinstance(info, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def facts(server: Any, replication: Any, time: Any, *past: Any) -> Facts | None:
    """What the replies to `ASKED` and `PAST` tell; None if one of `ASKED` was refused, or does not tell who it is."""
    if not (isinstance(server, bytes) and isinstance(replication, bytes) and isinstance(time, list)):
        return None
    info = fields(server) | fields(replication)
    if min(len(info.get("run_id", "")), len(info.get("master_replid", ""))) < SHORT:
        return None
    seconds, micros = cast("list[bytes]", time)
    for each in past:
        info |= fields(each)
    return Facts(
        info["run_id"],
        info["master_replid"],
        info.get("master_replid2", ""),
        float(info.get("uptime_in_seconds", 0)),
        int(seconds) * 1000 + int(micros) // 1000,
        int(info.get("connected_slaves", 0)),
        _loaded(info, int(seconds)),
    )


def _loaded(info: dict[str, str], clock: int) -> bool:
    """Whether a process began with keys. A replica did not: it loads what its primary sends.

    From 7.0 on a primary that loads a snapshot has a second replid, as if it had been a replica; but it has never
    received anything from a primary. 6.2 does not say what it loaded; but a process that has more keys than it changed,
    and has saved none of the changes, began with some.
    """

    def number(name: str) -> int:
        return int(info.get(name, "0"))

    if info.get("master_replid2", NO_REPLID) != NO_REPLID and info.get("total_net_repl_input_bytes") != "0":
        return False
    if number("aof_enabled") and number("aof_base_size"):
        return True
    if "rdb_last_load_keys_loaded" in info:
        return number("rdb_last_load_keys_loaded") + number("rdb_last_load_keys_expired") > 0
    unsaved = number("rdb_last_save_time") <= clock - number("uptime_in_seconds") + 1
    keys = sum(int(value[5:].partition(",")[0]) for value in info.values() if value.startswith("keys="))
    return unsaved and keys > number("rdb_changes_since_last_save")


class Story(NamedTuple):
    """How a slot of a cluster came to the node that serves it now."""

    former: str
    """The identity under which it was served, if something may have been lost since then; else "-"."""
    at: float
    """When, by our clock: no lease of before is younger."""
    fine: tuple[str, ...]
    """The identities of those from whom it came without loss: "<identity>" or "<identity>/<least ttl ms>"."""
    behind: Story | None = None
    """How it came to the former: that counts once it is proven that nothing was lost since."""


def lasting(identity: str, least: float) -> str:
    """What is said of an identity from which leases with this ttl (seconds) or a longer one came without loss."""
    return f"{identity}/{math.ceil(least * 1000)}" if least else identity


def onwards(fine: Iterable[str], least: float) -> list[str]:
    """What is said of these one step further, to which leases came with this ttl (seconds) or a longer one."""
    parts = [each.partition("/") for each in fine]
    return [lasting(identity, least + int(ms or 0) / 1000) for identity, _, ms in parts]


class Epoch:
    """What goes out with every message to a server under one identity."""

    __slots__ = (
        "_texts",
        "earlier",
        "facts",
        "fine",
        "former",
        "longer",
        "mark",
        "met",
        "since",
        "stories",
        "text",
        "wait",
    )

    def __init__(self, facts: Facts | None, wait: float | None, former: str, mark: str, longer: float = 0.0) -> None:
        self.facts = facts
        self.wait = None if wait is None else wait + longer  # seconds of quarantine; None: there is none
        self.longer = 0.0 if wait is None else longer  # of them, those for which another one may still grant
        self.former = former
        self.mark = mark
        self.fine: list[str] = []
        self.earlier: Mapping[str, Epoch] = {}  # those that the client knew here, by their identities
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
        former, at, *_ = self.story(slot)
        return former if former != "-" and now() < at + self.longer else ""

    def story(self, slot: int) -> Story:
        """What is known of a slot here."""
        former, at, more, behind = self.stories.get(slot) or Story(self.former, self.began, ())
        fine = [*self.fine, *more]
        while (proof := next((each for each in fine if former.startswith(each.partition("/")[0])), None)) is not None:
            if behind is None:
                former = "-"
                break
            former, at, more, behind = behind
            fine += onwards(more, int(proof.partition("/")[2] or 0) / 1000)
        return Story(former, at, tuple(dict.fromkeys(fine)), behind)

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
            former, at, fine, _ = self.story(slot)
            since = self.facts.now_ms + int((at - self.met) * 1000)
            history = " ".join([former, *fine[:MOST]])
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

    def prove(self, identity: str, least: float = 0.0) -> None:
        """Nothing was lost between that one and this, of leases with this ttl (seconds) or a longer one."""
        if all(each.partition("/")[0] != identity for each in self.fine):
            before = self.earlier.get(identity)
            self.fine += [lasting(identity, least), *onwards(before.fine if before else (), least)]
            del self.fine[MOST:]
        if any(self.former.startswith(each.partition("/")[0]) for each in self.fine):
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
        self.known = (
            ""  # of a node of a cluster: under which identity it had been met before the map was asked for last
        )
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
            epoch.earlier = self.epochs
            self.epochs[found.identity] = epoch
            if found.loaded and found.uptime < (epoch.wait or 0):
                epoch.suspect()
            if epoch.bars:
                log.warning(
                    _STARTED if epoch.former == "?" else _REPLACED,
                    address.shown,
                    epoch.began + (epoch.wait or 0) - now(),
                )
        self.latest, self.before = epoch, epoch.identity
        self.replicas = max(self.replicas, found.replicas)
        return epoch


class Move:
    """Slots of a cluster have gone from one node to another."""

    __slots__ = ("at", "before", "here", "known", "least", "left")

    def __init__(self, left: Memory, here: Memory, at: float) -> None:
        self.left = left
        self.here = here
        self.before = left.latest  # the epoch under which they were served
        self.known = here.known
        self.at = at
        # The ttl (seconds) of leases that came whole from a node that is still the primary that it was; math.inf: it is
        # not; None: nobody has looked.
        self.least: float | None = None


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


def lossless(address: Address, evidence: str, epoch: Epoch, left: float = PATIENCE * STEPS) -> float | None:
    """From which ttl (seconds) on no lease was lost between the server of that identity and the one of this epoch.

    math.inf: leases of any ttl may have been lost. None: not known yet. A handover loses nothing if the demoted primary
    went on with the history of the new one, and the clocks of both agree (see `least_ttl`). A restart proves nothing:
    which writes were on the disk when the process ended depends on settings of that time (CONFIG SET appendfsync,
    no-appendfsync-on-rewrite), and the new process knows only its own. Blocks, for about the seconds that are left to
    the caller. Only asked in a quarantine.
    """
    patience = min(PATIENCE, max(HASTE, left) / STEPS)
    here = read(address, patience)
    if here is None or here.info.get("run_id", "")[:SHORT] != epoch.identity[:SHORT]:
        return None  # out of reach; or another server by now, about which nobody has asked
    process, _, history = evidence.partition(":")
    second = here.info.get("master_replid2", NO_REPLID)
    if second == NO_REPLID or second[:SHORT] != history:
        return math.inf
    for key, value in here.info.items():
        if key.startswith("slave") and "ip=" in value:
            replica = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
            there = read(address.at(replica["ip"], int(replica["port"])), patience)
            if there is not None and there.info.get("run_id", "")[:SHORT] == process:
                follows = there.info.get("role") == "slave" and there.info.get("master_replid2") == second
                return least_ttl(here, there, address.shown, epoch.wait) if follows else None
    return None


class Reading(NamedTuple):
    """What a server said of itself."""

    info: dict[str, str]
    clock: float
    """Its clock (seconds), which it looked at after `before` and before `after` by ours."""
    before: float
    after: float


def read(address: Address, patience: float) -> Reading | None:
    """What a server says of itself; None if it can't be reached, or does not tell."""
    times: list[tuple[float, float]] = []
    try:
        server, replication, *clocks = ask(address, patience, *ASKED[:2], *LOOKS * ASKED[2:], times=times)
        looks = zip(times[2:], clocks, strict=True)
        (before, after), (seconds, micros) = min(looks, key=lambda look: look[0][1] - look[0][0])
        return Reading(fields(server) | fields(replication), int(seconds) + int(micros) / 1e6, before, after)
    except Exception:  # noqa: BLE001 (whoever looks for a proof has none, then)
        return None


def least_ttl(here: Reading, before: Reading, shown: str, wait: float | None) -> float:
    """From which ttl (seconds) on a lease that came from the server of before does not end too soon here.

    Leases come with the time at which they end. Where the clock is ahead they end too soon, while their holder is
    sure of them. But the holder itself stops DRIFT * ttl before that time (see `margin`): half of that is for clocks
    that differ, the other half for clocks that run at different speeds.
    """
    ahead = here.clock - before.clock + before.after - here.before  # at most
    if ahead <= SAME:
        return 0.0
    least = 2 * ahead / DRIFT
    if wait is not None and least > wait:
        least = math.inf
    if least > GRANT_LIFE:
        log.warning(
            "interlock: %s took over without loss, but its clock may be %.3g s ahead of the clock of the server before "
            "it, so leases from there end too soon: locks %s are in quarantine",
            shown,
            ahead,
            "that were in use" if least == math.inf else f"with a ttl below {least:.3g} s",
        )
    return least


def ask(
    address: Address, within: float, *commands: tuple[str, ...], times: list[tuple[float, float]] | None = None
) -> list[Any]:
    """The replies of a server, be it a replica, over a connection of redis-py. Raises what that raises; blocks.

    `times` gets our clock before and after each command.
    """
    from redis.exceptions import ResponseError  # noqa: PLC0415 (rarely needed)

    connection = address.connection(within)
    replies: list[Any] = []
    try:
        connection.connect()
        for command in commands:
            before = now()
            connection.send_command(*command)
            try:
                reply: Any = connection.read_response()
            except ResponseError as error:
                reply = error
            if times is not None:
                times.append((before, now()))
            if hasattr(reply, "items"):  # RESP3
                reply = [part for pair in reply.items() for part in pair]
            replies.append(reply)
    finally:
        connection.disconnect()
    return replies
