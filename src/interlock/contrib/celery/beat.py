"""`Beat`: the scheduler of `celery beat`, on as many machines as you like. One of them ticks.

    celery -A app beat -S interlock.contrib.celery:Beat

Theory. The beats elect one. The elected beat notes in the server of the locks when it has sent each entry, by commands
under its lease: a beat that has lost its lease notes nothing any more, however late it is. The next leader begins with
these notes, since its own schedule is a file of its machine, and old.

Rules. (a) No lease, no ticks. A beat asks for its lease before it looks at an entry, and again before it sends one. (b)
At most once: a beat notes the entry, then sends it. If the beat dies in between, nobody sends that run. (c) At least
once: a beat sends the entry, then notes it. If the beat dies in between, the next leader sends that run again; an entry
that was not sent is due again. (d) A run is done for a beat only once the server has confirmed its note: the beat sends
a note without a reply again. (e) If the server has lost its notes while another beat led, a beat with "at_most_once"
goes on from the moment at which it last saw the other one lead, and a beat with "at_least_once" from its own file.
"""

# Celery has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false, reportIncompatibleVariableOverride=false
# pyright: reportMissingParameterType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import heapq
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from celery.beat import PersistentScheduler, event_t

from interlock._protocol.names import keys_of
from interlock.errors import AcquireTimeout, ConfigError, LeaseLost, Unavailable

from .settings import locks_of, setting

if TYPE_CHECKING:
    from interlock import Election, Leadership

logger: Final = logging.getLogger("interlock.celery")
DUE: Final = ("at_most_once", "at_least_once")
TTL: Final = 10.0  # seconds until another beat takes over from one that has died, by default
RETRY: Final = 3.0  # seconds until a beat tries again to send what must be sent
TURN: Final = 1.0  # seconds that a beat without the lead waits for it in one tick
FORGOTTEN: Final = timedelta(days=1)  # a leader deletes older notes of entries that its schedule does not have
KEPT: Final = 366 * 86_400  # seconds for which the server keeps the notes: longer than a year's entry waits


class Beat(PersistentScheduler):  # type: ignore[misc]  # Celery has no types
    """Celery's scheduler, of which only the elected one sends tasks.

    Settings of the app: `interlock_url` says where the beats meet. `interlock_beat_due` is "at_most_once" (the
    default) or "at_least_once": what becomes of the entry that a beat was just sending when it died.
    `interlock_beat_ttl` (seconds, 10) is how long others then wait. `interlock_beat_name` is the name of the election,
    "beat:" and the name of the app.
    """

    _election: Election | None = None
    _lease: Leadership | None = None
    _key: str  # of the notes
    _due: str
    _ttl: float
    _owed: dict[str, tuple[int, datetime]]
    """Count and time of each run that was sent, and whose note is not certainly in the server."""
    _before: Any = None
    """The entry that is being sent, as it was before this run was counted."""
    _unsent: Any = None
    """The entry that could not be sent in this tick, and must be."""
    _other_led: datetime | None = None
    """When this process saw last that another beat leads."""
    _is_away = False  # whether the log says that no server answers
    _ticks = False  # whether a signal that arrives now interrupts a tick

    def setup_schedule(self) -> None:
        """Read the schedule. Raises ConfigError."""
        locks = locks_of(self.app)
        self._due = setting(self.app, "interlock_beat_due", DUE[0])
        if self._due not in DUE:
            raise ConfigError(f"interlock_beat_due must be {' or '.join(map(repr, DUE))}, not {self._due!r}")
        name = setting(self.app, "interlock_beat_name", f"beat:{self.app.main or 'celery'}")
        self._ttl = setting(self.app, "interlock_beat_ttl", min(TTL, locks.max_ttl))
        try:
            self._election = locks.election(name, ttl=self._ttl)
        except ConfigError as error:
            raise ConfigError(f"interlock_beat_name or interlock_beat_ttl: {error}") from None
        _, (_, self._key) = keys_of(name, locks.prefix, ("sent",))
        self._owed = {}
        super().setup_schedule()

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if this beat leads. Returns the seconds until the next tick."""
        self._ticks = True
        try:
            if not self._leads():
                return TURN if self._is_away else 0.0
            self._unsent = None
            pause: float = super().tick(*args, **kwargs)
            self._put_back()
            return min(pause, self._ttl / 3)
        finally:
            self._ticks = False

    # The lead

    def _leads(self) -> bool:
        """Whether this beat leads. One that does not waits for its turn, for a second at most."""
        try:
            if self._lease is None:
                self._take_over()
            else:
                self._lease.ensure()
                self._note_owed(self._lease)
        except AcquireTimeout as error:
            self._is_away = False
            if not error.quarantined:
                self._other_led = datetime.now(UTC)
        except LeaseLost as error:
            self._stand_down(error)
        except Unavailable as error:
            if self._lease is None and not self._is_away:
                self._is_away = True
                logger.warning("beat: no server of the locks answers, so nothing is sent: %s", error)
        return self._lease is not None

    def _take_over(self) -> None:
        """Wait for the lead, and go on with the notes of the beat before.

        Raises AcquireTimeout, Unavailable or LeaseLost, and then does not lead.
        """
        assert self._election is not None
        lease = self._election.campaign(timeout=TURN)
        try:
            notes = lease.execute("HGETALL", self._key, keys=[self._key])
            words = [word.decode() for word in notes if isinstance(word, bytes)] if isinstance(notes, list) else []
            noted = dict(zip(words[::2], words[1::2], strict=True))
            led = self._other_led if self.schedule and not noted else None
            if led is not None:
                logger.warning(
                    "beat: the server of the locks has restarted without its notes, so this beat goes on with its own "
                    "schedule file, %s",
                    f"but sends nothing that was due before {led:%Y-%m-%d %H:%M:%S} UTC"
                    if self._due == "at_most_once"
                    else "and may send again what another one has sent",
                )
            for name in noted.keys() - self.schedule.keys():
                if datetime.now(UTC) - _moment(noted[name]) > FORGOTTEN:  # else another beat may have a newer schedule
                    lease.execute("HDEL", self._key, name, keys=[self._key])
            for name, entry in self.schedule.items():
                if led is not None and self._due == "at_most_once":
                    _go_on(entry, f"{entry.total_run_count} {led.isoformat()}", may_be_newer=True)
                if name in noted:
                    _go_on(entry, noted[name], may_be_newer=self._due == "at_most_once" or name in self._owed)
                else:  # so that the next beat knows since when this entry waits for its first run
                    self._note(lease, name, entry.total_run_count, entry.last_run_at)
        except BaseException:
            lease.release()
            raise
        self._owed = {
            name: run for name, run in self._owed.items() if name in self.schedule and _run(self.schedule[name]) == run
        }
        self._heap = None  # the next tick makes it, of what the notes say
        self._lease, self._is_away = lease, False
        logger.info("beat: this one sends the tasks from now on, term %s", lease.term)

    def _stand_down(self, error: LeaseLost) -> None:
        """Send nothing from now on, until this beat leads again."""
        if self._lease is not None:
            self._lease = None
            logger.warning("beat: this one sends nothing any more: %s", error)

    # Notes

    def _note(self, lease: Leadership, name: str, count: int, moment: datetime) -> None:
        """Note that an entry was sent, or is sent next. Raises LeaseLost or Unavailable."""
        note = f"{count} {moment.astimezone(UTC).isoformat()}"
        lease.execute("HSET", self._key, name, note, keys=[self._key])
        lease.execute("EXPIRE", self._key, KEPT, keys=[self._key])

    def _note_owed(self, lease: Leadership) -> None:
        """Note again each run whose note the server has not confirmed. Raises LeaseLost or Unavailable."""
        for name, (count, moment) in [*self._owed.items()]:
            self._note(lease, name, count, moment)
            del self._owed[name]

    # One entry

    def is_due(self, entry: Any) -> tuple[bool, float]:
        """Whether the entry is to be sent now, and the seconds until it is to be looked at again."""
        due, pause = super().is_due(entry)
        if due and self._due == "at_most_once" and not self._may_send(entry):
            return False, TURN
        return due, pause

    def _may_send(self, entry: Any) -> bool:
        """Note that this entry is sent next. Returns whether the note is in the server."""
        if self._lease is None:
            return False
        try:
            self._note(self._lease, entry.name, entry.total_run_count + 1, entry.default_now())
        except LeaseLost as error:
            self._stand_down(error)
            return False
        except Unavailable as error:  # the note may be there: then the next try writes it again
            logger.warning("beat: %s is due, and is not sent yet: %s", entry.name, error)
            return False
        return True

    def reserve(self, entry: Any) -> Any:
        """Count the run of the entry that is sent next."""
        self._before = entry
        return super().reserve(entry)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send the entry, if this beat still leads."""
        try:
            if self._lease is None:
                return
            self._lease.ensure()
        except LeaseLost as error:
            self._undo_reserve()
            self._stand_down(error)
            logger.warning("beat: %s was due, and was not sent", entry.name)
        else:
            super().apply_entry(entry, producer=producer)

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Send the entry. Raises SchedulingError."""
        try:
            result = super().apply_async(entry, producer=producer, advance=advance, **kwargs)
        except BaseException:
            self._undo_reserve()
            raise
        if self._due == "at_least_once":
            self._owed[entry.name] = _run(self.schedule[entry.name])
            self._leads()  # notes it
        return result

    def _undo_reserve(self) -> None:
        """Let an entry be due again that was not sent. Not with "at_most_once": it may have been sent after all."""
        if self._due == "at_least_once" and self._before is not None:
            self._unsent = self.schedule[self._before.name] = self._before

    def _put_back(self) -> None:
        """Let an entry that was not sent be due in `RETRY` seconds, so that it holds no other entry back."""
        if (entry := self._unsent) is not None and self._heap is not None:
            later = event_t(self._when(entry, RETRY), 5, entry)
            self._heap = [later, *(event for event in self._heap if event.entry.name != entry.name)]
            heapq.heapify(self._heap)

    def close(self) -> None:
        """Give up the lead, so that another beat takes over at once."""
        if self._ticks:  # a handler of a signal calls this, raises SystemExit, and then the service calls it again
            return
        try:
            super().close()
        finally:
            if self._lease is not None:
                lease, self._lease = self._lease, None
                try:
                    self._note_owed(lease)
                    lease.release()
                except (LeaseLost, Unavailable) as error:
                    logger.warning("beat: another one takes over when the lease has run out: %s", error)


def _run(entry: Any) -> tuple[int, datetime]:
    """The last run of this entry: its count and its time."""
    return entry.total_run_count, entry.last_run_at


def _moment(note: str) -> datetime:
    return datetime.fromisoformat(note.partition(" ")[2])


def _go_on(entry: Any, note: str, *, may_be_newer: bool) -> None:
    """Go on with the note of this entry, unless this beat has sent it later than the note says.

    With "at_least_once" only what this process has sent can be newer: Celery writes into its file that an entry was
    sent before it knows so.
    """
    mine: datetime = entry.last_run_at
    sent = _moment(note).astimezone(mine.tzinfo)
    sent = sent if mine.tzinfo is not None else sent.replace(tzinfo=None)
    if not may_be_newer or not entry.total_run_count or sent > mine:
        entry.last_run_at, entry.total_run_count = sent, int(note.split(maxsplit=1)[0])
