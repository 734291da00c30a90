"""Telling other people what this process holds and waits for: one small entry in the server for each session.

Theory. The hot path knows nothing of the registry. The worker of ends wakes up within a second of any lease, and the
worker of waiters sends heartbeats while a caller waits: both call `look()`. The worker of the registry then calls
`report()`, which compares what is held and awaited with the last report, and writes an entry if that has changed, or is
old.

Rules. (a) A session writes at most once in `REPORT_INTERVAL`, and looks `REPORT_DELAY` after it was called, so that a
short section costs no message: the registry is for people who ask why something is stuck. (b) No decision reads an
entry, and no error of the registry reaches a caller. (c) If the server refuses the entries, the session goes on without
and tries again from time to time. (d) A session that has nothing left deletes its entry; that of a dead process ends
with its TTL.
"""

from __future__ import annotations

import heapq
import sys
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from interlock._client.error_texts import server_error, visible_cause
from interlock._client.places import line_of
from interlock._client.self_wait import lasts, name_of_caller, section_of
from interlock._people.answers import Answers
from interlock._people.machine import is_gone, this_machine
from interlock._people.observation import trace_id_of
from interlock._protocol.log import log
from interlock._protocol.names import printable, token_part
from interlock._protocol.server import Disconnected, ServerError, is_transient
from interlock._protocol.timing import FOREVER, RETRY_FOR
from interlock._protocol.tokens import Process, Token
from interlock.errors import LockError, Unavailable
from interlock.primitives.permits import PermitArgs
from interlock.primitives.registry import (
    ENTRY_TTL,
    REGISTRY,
    REPEAT_INTERVAL,
    REPORT_INTERVAL,
    Entry,
    Holding,
    Item,
    LeaveCall,
    ListCall,
    ListReply,
    ReadReply,
    ReportCall,
    caller_id_in,
    encode_entry,
    read_message,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from interlock._client.book import Book
    from interlock._client.cohorts import Cohorts
    from interlock._client.grant import Attempt, Grant
    from interlock._client.waiting import Waiters
    from interlock._people.answers import Answer
    from interlock._protocol.runtime import AutoResetEvent
    from interlock._protocol.server import Message, Server
    from interlock.primitives.registry import Party

REPORT_DELAY: Final = 1.0  # seconds until the first look: a section that is over by then costs no message
CALL_TIMEOUT: Final = 1.0  # seconds that one report may take
REFUSED_INTERVAL: Final = 60.0  # seconds after a refusal until the next try
MAX_ITEMS: Final = 50  # leases, and waiters, in one entry: the oldest ones
READ_BATCH: Final = 100  # processes that one write asks about

Said: TypeAlias = tuple[frozenset[str], frozenset[str]]  # the tokens of what is held, and of what waits


class Registry:
    """The entry of one session, and what all sessions say."""

    def __init__(
        self, server: Server, waiters: Waiters, book: Book, cohorts: Cohorts, wake_at: Callable[[float], None],
        process: Process, session_id: str, all_books: Callable[[], Iterable[Book]], *, writes: bool,
    ) -> None:  # fmt: skip
        self.server = server
        self.runtime = server.runtime
        self.waiters = waiters
        self.book = book
        self.cohorts = cohorts
        self.writes = writes  # else this session only reads what others say
        self.wake_at = wake_at  # wakes the worker that calls report()
        self.process = process
        self.session_id = session_id
        self.next_look = FOREVER
        self.reported_at = -FOREVER  # when the last report was sent
        self.entry_until = -FOREVER  # when the server forgets the last entry that it may have
        self.reported: Said | None = None  # in the last report; None: no entry
        self.is_repeated = True  # whether the last report says the same as the one before
        self.ended = False  # the session is closed: no report begins any more
        self.sending: AutoResetEvent | None = None  # a report is under way; the event is set when it is done
        self.refused = False  # the server has refused an entry, and the log says so
        self.refused_until = -FOREVER  # until when this session writes none
        self.all_books = all_books  # of all clients in this process
        self.place = ""  # what entries say in place of a line of code: of a program in which no user wrote a line
        self._said = Answers[list[Entry]](self.runtime)  # by process

    def look(self) -> None:
        """Let the worker look soon, since something is held or awaited. Any thread may call this."""
        if self.next_look == FOREVER and not self.ended:
            self.next_look = max(self.runtime.now() + REPORT_DELAY, self.reported_at + REPORT_INTERVAL)
            self.wake_at(self.next_look)

    def look_for_cohorts(self) -> None:
        """The same, if callers wait in a cohort: no heartbeat is sent for them that would call `look`."""
        if self.cohorts.next_look != FOREVER:
            self.look()

    async def report(self) -> list[Attempt] | None:
        """Report what this session holds and waits for. Returns what waits; None if it was not time to look."""
        now = self.runtime.now()
        if now < self.next_look or self.ended:
            return None
        attempts = [*list(self.waiters.registered.values()), *self.cohorts.waiting()]
        waits = [each for each in attempts if each.waits_since < FOREVER and not each.abandoned]
        holds = self.book.held() if self.writes else []
        granted = {grant.attempt for grant in holds}  # its caller may not have run since, but waits no more
        waits = [each for each in waits if each not in granted]
        self.next_look = now + REPORT_INTERVAL if holds or waits else FOREVER  # first: look() may be called meanwhile
        if self.writes and now >= self.refused_until:
            await self._report(
                heapq.nsmallest(MAX_ITEMS, holds, key=lambda grant: grant.since),
                heapq.nsmallest(MAX_ITEMS, waits, key=lambda attempt: attempt.waits_since),
                now,
            )
        return waits

    async def _report(self, holds: list[Grant], waits: list[Attempt], now: float) -> None:
        """Report these, if they are not those of the last report, or if that is long ago."""
        tokens = frozenset(grant.token for grant in holds), frozenset(attempt.token for attempt in waits)
        if not holds and not waits:
            if self.has_entry:
                await self._send(self.leave_message(), None)
        elif tokens != self.reported or not self.is_repeated or now >= self.reported_at + REPEAT_INTERVAL:
            # Send a new report a second time at the next look: a deadlock counts only leases and waits that lasted.
            self.is_repeated = tokens == self.reported
            entry = encode_entry(
                sys.modules["interlock"].__version__,
                [self.held_item(grant, now) for grant in holds],
                [self.waiting_item(attempt, now) for attempt in waits],
                this_machine(),
            )
            ttl_ms = str(int(ENTRY_TTL * 1000))
            await self._send(ReportCall(str(self.process), self.session_id, ttl_ms, entry).message, tokens)

    @property
    def has_entry(self) -> bool:
        """Whether the server may have an entry of this session."""
        return self.reported is not None and self.runtime.now() < self.entry_until

    async def end(self, until: float) -> None:
        """Begin no report any more, and wait for the one under way: it would arrive behind what deletes the entry."""
        with self.runtime.mutex:
            self.ended, self.next_look = True, FOREVER
            sending = self.sending
        if sending is not None:
            await sending.wait(until)

    def leave_message(self) -> Message:
        """The message that deletes the entry of this session."""
        return LeaveCall(str(self.process), self.session_id).message

    async def _send(self, message: Message, tokens: Said | None) -> None:
        with self.runtime.mutex:
            if self.ended:
                return
            sending = self.sending = self.runtime.event()
        now, before = self.runtime.now(), self.reported
        # Until the reply, the server may have an entry, and nobody knows which one.
        self.reported_at, self.reported = now, (frozenset(), frozenset())
        self.entry_until = now + CALL_TIMEOUT + ENTRY_TTL
        script, keys, args = message
        try:
            await self.server.call(script, keys, args, now + CALL_TIMEOUT)
        except (Disconnected, LockError) as error:
            self._on_no_answer(error, tokens)
        except ServerError as error:
            self.reported = before
            if is_transient(str(error)):
                self._on_no_answer(error, tokens)
            else:
                self._on_refusal(error, now)
        else:
            self.reported, self.refused = tokens, False
        finally:
            self.sending = None
            sending.set()

    def _on_no_answer(self, error: Exception, tokens: object) -> None:
        log.debug("the registry at %s: no answer: %s", self.server.display_url, error)
        if tokens is None:
            self.look()

    def _on_refusal(self, error: ServerError, now: float) -> None:
        if not self.refused:
            log.info(
                "%s refuses the entries of the registry, so `interlock ls` does not show what this process holds "
                "[%s]. ls() raises the reason with a way out; or make the Interlock with registry=False",
                self.server.display_url,
                error,
            )
        self.refused, self.refused_until = True, now + REFUSED_INTERVAL

    # What this session has

    def held_item(self, grant: Grant, now: float) -> Item:
        """What an entry says of this lease."""
        return self._item(grant.attempt, grant.token, grant.fence, now - grant.since, lasting=_lasts(grant))

    def waiting_item(self, attempt: Attempt, now: float) -> Item:
        """What an entry says of this wait."""
        is_local = attempt.token not in self.waiters.registered
        return self._item(attempt, attempt.token, None, now - attempt.waits_since, local=is_local)

    def _item(
        self, attempt: Attempt, token: str, fence: int | None, age: float, *, lasting: bool = False, local: bool = False
    ) -> Item:
        resource, caller = attempt.resource, caller_of(attempt)
        args = resource.acquire_args
        permits, limit = (int(args.permits), int(args.limit)) if isinstance(args, PermitArgs) else (1, 1)
        return Item(
            resource.kind,
            resource.name,
            resource.prefix,
            token,
            fence,
            self.place or line_of(attempt.place),
            max(0.0, age),
            trace_id_of(attempt),
            _caller_number(attempt),
            permits,
            limit,
            int(lasting),
            "" if caller is None else token_part(name_of_caller(caller)),
            int(local),
        )

    # What all sessions have

    async def holding(self, token: str, until: float) -> Holding | None:
        """Where in its code the holder with this token is; None if nobody knows, or no answer comes in time."""
        now = self.runtime.now()
        for book in self.all_books():
            if (grant := book.find(token)) is not None:
                return Holding(line_of(grant.attempt.place), now - grant.since, 0.0)
        said, party = await self._find(token, until)
        if said is None or party is None:
            return None
        # A party without a fence was waiting when its process last reported: nobody knows for how long it has held.
        seconds = None if party.fence is None else party.seconds + now - said.asked_at
        silent_for = party.reported_ago if party.is_silent else 0.0
        return Holding(printable(party.place), seconds, silent_for, party.gone)

    async def holder_waits(self, token: str, until: float) -> bool:
        """Whether the holder with this token waits for something, by the last report of its process."""
        said, party = await self._find(token, until)
        if said is None or party is None or not party.caller_id:
            return False
        return any(each.caller_id == party.caller_id for entry in said.value for _, each in entry.waits)

    def caller_id(self, attempt: Attempt) -> str:
        """The id that tells the caller of this attempt from all others. "" if it is gone, or if nobody knows it."""
        return caller_id_in(self.process, _caller_number(attempt))

    async def _find(self, token: str, until: float) -> tuple[Answer[list[Entry]] | None, Party | None]:
        """All that its process says, and what it says of the holder with this token. None for what nobody knows."""
        holder = Token.parse(token)
        if holder is None:
            return None, None
        processes = [holder.process]
        said = await self._said.get(str(holder.process), lambda: self.entries_of(processes, until), until)
        entries = said.value if said is not None else []
        return said, next(
            (each for entry in entries for part in entry for _, each in part if each.token == token), None
        )

    async def all_entries(self, query: Callable[..., Awaitable[Any]]) -> tuple[list[Entry], float]:
        """What all processes say, and by how many seconds the server's clock is ahead of the clock of this runtime.

        `query`: that of the Core. Raises Unavailable or ConfigError.
        """
        found, server_is_ahead, _ = await self.every_entry(query)
        return found, server_is_ahead

    async def every_entry(self, query: Callable[..., Awaitable[Any]]) -> tuple[list[Entry], float, int]:
        """As `all_entries`, and how many entries this version can't read."""
        reply = ListReply.parse(await query(REGISTRY, *ListCall().encode()))
        server_is_ahead, processes = reply.now_ms / 1000 - self.runtime.now(), reply.parse_processes()
        found: list[Entry] = []
        unreadable = 0
        for i in range(0, len(processes), READ_BATCH):
            try:
                replies = await self._replies_of(processes[i : i + READ_BATCH], self.runtime.now() + RETRY_FOR)
            except Disconnected as error:
                text = f"{REGISTRY}: no answer from {self.server.display_url} ({error})"
                raise Unavailable(text) from visible_cause(error)
            except ServerError as error:
                raise server_error(REGISTRY, self.server.display_url, str(error)) from None
            found += (entries := _parse(replies))
            unreadable += sum(len(each.entries) // 2 for _, each in replies) - len(entries)
        return found, server_is_ahead, unreadable

    async def some_entries(self, most: int, until: float) -> list[Entry] | None:
        """The entries of all sessions, by the time `until`; None if more than `most` sessions have entries.

        Raises Disconnected, ServerError or LockError.
        """
        script, keys, args = ListCall(str(most + 1)).message
        reply = ListReply.parse(await self.server.call(script, keys, args, until))
        if len(reply.processes) > most:
            return None
        replies = await self._replies_of(reply.parse_processes(), until)
        return _parse(replies) if sum(len(each.entries) for _, each in replies) <= 2 * most else None

    async def entries_of(self, processes: list[Process], until: float) -> list[Entry]:
        """The entries of these processes. Raises Disconnected, ServerError or LockError."""
        return _parse(await self._replies_of(processes, until))

    async def _replies_of(self, processes: list[Process], until: float) -> list[tuple[Process, ReadReply]]:
        replies = await self.server.call_many([read_message(process) for process in processes], until)
        found: list[tuple[Process, ReadReply]] = []
        for process, reply in zip(processes, replies, strict=True):
            if not isinstance(reply, Exception):
                found.append((process, ReadReply.parse(reply)))
            elif "WRONGTYPE" not in str(reply):  # else the key is somebody else's
                raise reply
        return found


def _parse(replies: list[tuple[Process, ReadReply]]) -> list[Entry]:
    found: list[Entry] = []
    for process, reply in replies:
        entries = reply.parse_entries(process, is_gone)
        found += (entry for entry in entries if entry is not None)
        if None in entries:
            log.debug("the registry has an entry of %s that this version can't read", process)
    return found


def caller_of(attempt: Attempt) -> Any:
    """The thread or task whose wait or lease this is. None if it is gone, or if an owner counts in its place."""
    return None if attempt.resource.owner_prefix else attempt.live_caller


def _caller_number(attempt: Attempt) -> str:
    caller = caller_of(attempt)
    return "" if caller is None else f"{id(caller):x}"


def _lasts(grant: Grant) -> bool:
    """Whether nothing but the end of the holder's own `with` or decorated call ends this lease."""
    place, section = grant.attempt.place, section_of(grant)
    return lasts(grant) and place is not None and section is not None and section.holds_for_its_body(place)
