"""What processes say that they hold and wait for: the entries of the registry. registry.lua stores them.

An entry is for people, and no decision reads it: it may be some seconds old, and the process may have died since. A
time in an entry is an age, so that no clock of a client counts: the server notes when it stored the entry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from interlock._protocol.resource import Resource
from interlock._protocol.tokens import Process, Token
from interlock.primitives.plain import Answer
from interlock.primitives.scripts import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from interlock._protocol.server import Message
    from interlock.primitives.messages import DoneReply, Raw, Words
    from interlock.primitives.votes import Votes

INDEX: Final = "{interlock:processes}"  # the key of the index; with a process behind it, the key of the entries of that
ENTRY_TTL: Final = 60.0  # seconds after which the server forgets the entry of a silent process
MAX_PROCESSES: Final = 10_000  # processes that one `list` names
REPORT_INTERVAL: Final = 2.0  # seconds between two reports of a session, at least
REPEAT_INTERVAL: Final = 5.0  # seconds after which a session repeats a report in which nothing has changed
SILENT_AFTER: Final = 3 * REPEAT_INTERVAL  # seconds without a report after which a process counts as silent
ENTRY_VERSION: Final = 1
MAX_ENTRY: Final = 32_000  # characters
MAX_DIGITS: Final = 16  # of a time in ms
MAX_READ: Final = 10 * MAX_ENTRY  # bytes: this version reads no longer entry
MAX_SECONDS: Final = 1e10
MAX_VERSION: Final = 40  # characters of the `library` of an entry: another version may write a longer one


@dataclass(frozen=True)
class Party(Answer):
    """A caller that holds something or waits for it, as the server and its own process say."""

    token: str
    """Of its attempt or lease: host/pid/thread or task/random, with the label before the host."""
    fence: int | None
    """The fence of its lease; None if it waits."""
    host: str
    pid: int
    label: str
    """The `label` of its Interlock; "" if that has none."""
    caller: str
    """The name of its thread or task."""
    place: str
    """File and line where its code acquires."""
    seconds: float
    """For how long it has held or waited; 0 if nobody knows."""
    reported_ago: float
    """Seconds since its process last said so; 0 if the process has not said it. A living process repeats it every few
    seconds."""
    trace_id: str
    """Of the trace in which it acquires, if there is one; else ""."""
    caller_id: str
    """Tells its thread or task from all others, whatever their names; "" if nobody knows."""
    permits: int = 1
    """How many permits it has or wants; an rwlock's writer has all of them."""
    limit: int = 0
    """How many permits there are, as its process says; 0 if the process does not say."""
    lasting: bool = False
    """Whether nothing but the end of its own `with` or decorated call ends its lease."""
    confirmed: bool = True
    """False while it is handed over to this caller, which has not begun its section yet."""
    gone: bool = False
    """Whether its process has ended: known of processes on this host only."""
    local: bool = False
    """Whether it waits behind another caller of its process, and not in the server's queue."""
    library: str = ""
    """The version of interlock in its process; "" if nobody knows."""

    @property
    def process(self) -> str:
        """Host and process."""
        return f"{self.host}/{self.pid}"

    @property
    def who(self) -> str:
        """Label, host, process, and thread or task."""
        return f"{self.label}@{self.process}/{self.caller}".removeprefix("@") if self.host else self.token

    @property
    def is_silent(self) -> bool:
        """Whether its process has ended, or has missed several reports: it is dead, stopped, or cut off."""
        return self.gone or self.reported_ago > SILENT_AFTER


class Holding(NamedTuple):
    """What is known of the holder of a lease."""

    place: str
    """File and line where it acquired the lease."""
    seconds: float | None
    """Seconds for which it has held the lease; None if its process has not said yet that it holds the lease."""
    silent_for: float
    """Seconds since the last report of its process, if that is long ago; else 0."""
    gone: bool = False
    """Whether its process has ended."""

    def sentence(self) -> str:
        """For messages."""
        silent = f"; its process has said nothing for {self.silent_for:.0f} s" if self.silent_for else ""
        silent = "; its process has ended" if self.gone else silent
        ago = "" if self.seconds is None else f" {self.seconds:.3g} s ago"
        return f"It was acquired{ago} at {self.place}{silent}"


@dataclass(frozen=True)
class Listed(Answer):
    """One synchronizer, and the callers that hold it or wait for it.

    The server says who holds it and who stands in its queue. The processes say the rest: where in their code, since
    when, and which callers wait behind others of their process.
    """

    kind: str
    """The name of the method of Interlock that makes it, such as "semaphore"; an rlock is a lock."""
    name: str
    prefix: str
    """Of the Interlock that made it."""
    holders: tuple[Party, ...]
    """Its holders, the oldest first: a thousand at most."""
    waiters: tuple[Party, ...]
    """Its waiters, the oldest first: the first thousand of the server's queue, and callers behind these."""
    waiting: int = 0
    """How many callers wait."""
    processes: int = 0
    """In how many processes they wait."""
    motion: str = ""
    """If callers wait: "moves" if it passes from holder to holder, "stuck" if it does not; "" if nobody can tell."""
    handovers: float | None = None
    """If it moves: waiters that leave the server's queue, a second; None if nobody has counted them."""
    unchanged: float | None = None
    """Seconds since it was last granted to anybody."""


REGISTRY: Final = Resource("registry", "processes", load("registry"), (INDEX,))  # as its errors name it


# Entries


class Item(NamedTuple):
    """One thing that a session holds or waits for."""

    kind: str
    name: str
    prefix: str
    token: str
    fence: int | None
    place: str
    age: float
    """Seconds for which the session has held it or waited for it."""
    trace_id: str
    caller_id: str
    permits: int = 1
    limit: int = 0
    lasting: int = 0
    """1 if nothing but the end of a `with` or of a decorated call ends the lease."""
    caller: str = ""
    """The name of its thread or task. The token names another one, if the lease or the place in the queue has passed
    from caller to caller."""
    local: int = 0
    """1 if it waits behind another caller of its process, and not in the server's queue."""


def encode_entry(library: str, holds: Sequence[Item], waits: Sequence[Item], machine: str = "") -> str:
    """The entry of a session. If it would be too long, it keeps only the beginning of both lists.

    `library`: the version of interlock. `machine`: where the process id means this process; "" if nobody knows.
    """
    entry = json.dumps(
        {
            "v": ENTRY_VERSION,
            "library": library,
            "machine": machine,
            "holds": [item._replace(age=round(item.age, 3)) for item in holds],
            "waits": [item._replace(age=round(item.age, 3)) for item in waits],
        },
        separators=(",", ":"),
    )
    if len(entry) <= MAX_ENTRY:
        return entry
    return encode_entry(library, holds[: len(holds) // 2], waits[: len(waits) // 2], machine)


class Entry(NamedTuple):
    """What one session said, as the server has it."""

    holds: Sequence[tuple[Item, Party]]
    waits: Sequence[tuple[Item, Party]]


NOTHING: Final = Entry((), ())


def _is_known_nowhere(_machine: str, _pid: int) -> bool:
    return False


def parse_entry(
    process: Process, stored: bytes, now_ms: float, is_gone: Callable[[str, int], bool] = _is_known_nowhere
) -> Entry | None:
    """Parse the entry that the server has for a session of this process. None if this version can't read the entry.

    `is_gone`: whether this process of a machine has surely ended.
    """
    try:
        if len(stored) > MAX_READ:
            return None
        written_ms, _, text = stored.partition(b" ")
        # Never below 0: if somebody has set the server's clock back, the time of an older entry may be later than now.
        ago = abs(now_ms - int(written_ms)) / 1000
        if ago > ENTRY_TTL:
            return NOTHING
        fields = json.loads(text)
        if fields["v"] != ENTRY_VERSION:
            return None
        gone = is_gone(str(fields.get("machine", "")), process.pid)
        library = str(fields.get("library", ""))[:MAX_VERSION]
        holds, waits = (_items(process, fields[part], ago, library, gone=gone) for part in ("holds", "waits"))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):  # the last: of an infinite number
        return None
    return Entry(holds, waits)


def _items(process: Process, stored: Any, ago: float, library: str, *, gone: bool) -> list[tuple[Item, Party]]:
    found: list[tuple[Item, Party]] = []
    for fields in stored:
        # A later version may add fields at the end.
        item = Item(*fields[: len(Item._fields)])
        for text in (*item[:4], item.place, item.trace_id, item.caller_id, item.caller):
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # another version may have
                raise TypeError
        if not 0 <= float(item.age) <= MAX_SECONDS:
            raise ValueError
        for number in (item.fence or 0, item.permits, item.limit, item.lasting, item.local):
            if not 0 <= int(number) < 1 << 63:
                raise ValueError
        found.append((item, party_of(process, item, ago, library, gone=gone)))
    return found


def party_of(process: Process, item: Item, ago: float, library: str = "", *, gone: bool = False) -> Party:
    """The party of an item that this process reported `ago` seconds ago."""
    return Party(
        token=item.token,
        fence=None if item.fence is None else int(item.fence),
        host=process.host,
        pid=process.pid,
        label=process.label,
        caller=item.caller or (token.caller if (token := Token.parse(item.token)) is not None else "?"),
        place=item.place,
        seconds=round(float(item.age) + ago, 3),
        reported_ago=ago,
        trace_id=item.trace_id,
        caller_id=caller_id_in(process, item.caller_id),
        permits=int(item.permits),
        limit=int(item.limit),
        lasting=bool(item.lasting),
        gone=gone,
        local=bool(item.local),
        library=library,
    )


def caller_id_in(process: Process, number: str) -> str:
    """The caller_id of the caller with this number. It has no label: a thread may use several Interlocks."""
    return f"{process.host}/{process.pid}/{number}" if number else ""


def group_by_name(entries: Iterable[Entry], pattern: str = "*") -> list[Listed]:
    """What the entries hold and wait for, by kind and name, if the name matches this shell pattern.

    Only the processes say this: `_people/views.py` joins it with what the server says.
    """
    things: dict[tuple[str, str, str], tuple[list[Party], list[Party]]] = {}
    for entry in entries:
        for number, part in enumerate(entry):
            for item, party in part:
                if fnmatchcase(item.name, pattern):
                    things.setdefault((item.prefix, item.name, item.kind), ([], []))[number].append(party)
    return [
        Listed(kind, name, prefix, _oldest_first(holders), _oldest_first(waiters))
        for (prefix, name, kind), (holders, waiters) in sorted(things.items())
    ]


def _oldest_first(parties: list[Party]) -> tuple[Party, ...]:
    return tuple(sorted(parties, key=lambda party: -party.seconds))


# Messages


class ReportCall(NamedTuple):
    """Stores the entry of a session."""

    process: str
    session: str
    ttl_ms: str
    entry: str

    def encode(self) -> Words:
        """See Call."""
        return ("report", *self)

    @classmethod
    def parse(cls, args: Raw) -> ReportCall:
        """Parse an encoded call."""
        return cls(*args[1:])

    @property
    def message(self) -> Message:
        """The message that carries this call."""
        return load("registry"), (INDEX, entries_key(self.process)), self.encode()


class LeaveCall(NamedTuple):
    """Deletes the entry of a session."""

    process: str
    session: str

    def encode(self) -> Words:
        """See Call."""
        return ("leave", *self)

    @classmethod
    def parse(cls, args: Raw) -> LeaveCall:
        """Parse an encoded call."""
        return cls(*args[1:])

    @property
    def message(self) -> Message:
        """The message that carries this call."""
        return load("registry"), (INDEX, entries_key(self.process)), self.encode()


class ListCall(NamedTuple):
    """Asks for the processes that have entries."""

    most: str = str(MAX_PROCESSES)

    def encode(self) -> Words:
        """See Call."""
        return ("list", self.most)

    @classmethod
    def parse(cls, args: Raw) -> ListCall:
        """Parse an encoded call."""
        return cls(*args[1:])

    @property
    def message(self) -> Message:
        """The message that carries this call."""
        return load("registry"), (INDEX,), self.encode()


class ListReply(NamedTuple):
    """The processes that have entries."""

    now_ms: int
    processes: Sequence[bytes]

    def encode(self) -> Raw:
        """See Reply."""
        return [self.now_ms, *self.processes]

    @classmethod
    def parse(cls, reply: Raw) -> ListReply:
        """Parse the reply that the script returned."""
        return cls(reply[0], reply[1:])

    def parse_processes(self) -> list[Process]:
        """The processes in the reply, without words that name no process: interlock writes no such words."""
        found = (Process.parse(each.decode(errors="replace")) for each in self.processes)
        return [process for process in found if process is not None]


class ReadCall(NamedTuple):
    """Asks for the entries of a process."""

    def encode(self) -> Words:
        """See Call."""
        return ("read",)

    @classmethod
    def parse(cls, _args: Raw) -> ReadCall:
        """Parse an encoded call."""
        return cls()


def read_message(process: Process) -> Message:
    """The message that asks for the entries of this process."""
    return load("registry"), (INDEX, entries_key(str(process))), ReadCall().encode()


class ReadReply(NamedTuple):
    """The entries of a process."""

    now_ms: int
    entries: Sequence[bytes]
    """Session, entry, session, entry ..."""

    def encode(self) -> Raw:
        """See Reply."""
        return [self.now_ms, *self.entries]

    @classmethod
    def parse(cls, reply: Raw) -> ReadReply:
        """Parse the reply that the script returned."""
        return cls(reply[0], reply[1:])

    def parse_entries(
        self, process: Process, is_gone: Callable[[str, int], bool] = _is_known_nowhere
    ) -> list[Entry | None]:
        """Each entry of this process, or None in its place if this version can't read it. See parse_entry()."""
        return [parse_entry(process, stored, self.now_ms, is_gone) for stored in self.entries[1::2]]


def entries_key(process: str) -> str:
    """The key of the entries of this process."""
    return f"{INDEX}:{process}"


# The votes of a quorum. It is enough if one server has the entry.


def merge_done(votes: Votes[Any, DoneReply], _rules: object) -> DoneReply:
    """Merge the replies to a report or a leave."""
    return votes.replies[0]


def merge_list(votes: Votes[ListCall, ListReply], _rules: object) -> ListReply | None:
    """Merge the lists of processes."""
    if votes.pending:
        return None
    every = dict.fromkeys(process for vote in votes.replies for process in vote.processes)
    return ListReply(max(vote.now_ms for vote in votes.replies), list(every))


def merge_read(votes: Votes[ReadCall, ReadReply], _rules: object) -> ReadReply | None:
    """Merge the entries of a process: of each session the newest, since a server may have missed some reports."""
    if votes.pending:
        return None
    newest: dict[bytes, tuple[int, bytes]] = {}
    for vote in votes.replies:
        for session, stored in zip(vote.entries[::2], vote.entries[1::2], strict=True):
            written_ms, _, entry = stored.partition(b" ")
            if not written_ms.isdigit() or len(written_ms) > MAX_DIGITS:
                continue  # no entry
            ago = abs(vote.now_ms - int(written_ms))  # both by the clock of that server: clocks of servers differ
            if session not in newest or ago < newest[session][0]:
                newest[session] = ago, entry
    now_ms = max(vote.now_ms for vote in votes.replies)
    entries = [(session, b"%d %b" % (now_ms - ago, entry)) for session, (ago, entry) in newest.items()]
    return ReadReply(now_ms, [part for pair in entries for part in pair])
