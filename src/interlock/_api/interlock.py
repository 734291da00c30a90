"""The Interlock: where the locks are, and what makes them."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, cast

from interlock._client.grant import AcquireOptions, shared
from interlock._client.reentrancy import HeldByCaller
from interlock._protocol.acks import checked_acks
from interlock._protocol.names import (
    MIN_TTL,
    checked_bool,
    checked_name,
    checked_ttl,
    duration,
    positive_int,
    tagged,
)
from interlock._protocol.timing import MAX_TTL, TRY_FOR
from interlock._quarantine.histories import Histories
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives import barrier, election, latch, lock, once, permits
from interlock.primitives.messages import InspectCall
from interlock.primitives.once import Skipped

from .face import Face
from .functions import name_of
from .misuse import INTERLOCK_HINTS, advised
from .multi import checked_members
from .options import DEFAULT_TTL, LeaseT, OptionsOf, timeout_of
from .run_names import run_source
from .section import Section
from .synchronized import CallName, busy_answer, decorated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock._connect.address import Address, Quorum
    from interlock._connect.clusters import Cluster
    from interlock._protocol.acks import Acks
    from interlock._session.session import Session
    from interlock.primitives.registry import Listed

MultiLeaseT = TypeVar("MultiLeaseT")
MemberT = TypeVar("MemberT")
P = ParamSpec("P")
R = TypeVar("R")
NOTHING: Final[Any] = None  # in place of an argument that a mistaken call leaves out
MIN_TRY_FOR: Final = 0.01  # seconds: less than a round trip is no try
MAX_TRY_FOR: Final = 3600.0  # seconds
MAX_CONNECTIONS: Final = 64  # to one server, by default
MAX_MAX_CONNECTIONS: Final = 65_535
MAX_MAX_WAITERS: Final = 1_000_000
MONTH: Final = 30 * 86_400.0  # seconds
ON_A_QUORUM: Final = ("lock", "rlock", "multi", "election", "once")  # what servers that share nothing can agree on


class InterlockCore(Face, Generic[LeaseT, MultiLeaseT, MemberT]):
    """Locks on one server.

    `target` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`, `embedded://`), a client of
    redis-py or valkey-py (asyncio: of redis.asyncio or valkey.asyncio) whose parameters are taken over, or nothing:
    then $INTERLOCK_URL.

    `prefix` stands before every name. `max_ttl` (seconds) is the longest ttl that a lock may have, and so how long
    nothing is granted after a restart or failover that may have lost leases (30; the same in all processes);
    `quarantine=False` turns that off.
    `try_for` (seconds) bounds a call that does not wait, `try_acquire()` or `timeout=0`: a server that does not answer
    within it is Unavailable. `confirm=False` makes that the default of `lock(confirm=...)`. `label` tells people who we
    are. `max_connections` bounds the connections that threads open to one server; a thread that finds none idle waits
    within its timeout. `registry=False`: the server gets no entry of what this process holds and waits for, which is
    what ls() reads. Raises ConfigError.

    An Interlock connects at its first use. Close it, or use it in a `with` (asyncio: `async with`): that gives back all
    that is held. It is safe to share between threads; a child made by fork holds nothing and connects anew. In asyncio
    it may be made outside of any loop and used in several, one after another or in several threads: it has a connection
    for each, and each loop closes its own.
    """

    _instead_of_pickling = "make it in each process, of the same URL"
    _init_advice = ""
    _hints = INTERLOCK_HINTS
    _for_asyncio: ClassVar[bool]
    _rlock_type: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        target: str | object | None = None,
        *,
        prefix: str = "lock:",
        max_ttl: float = MAX_TTL,
        quarantine: bool = True,
        confirm: bool = True,
        try_for: float = TRY_FOR,
        label: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        registry: bool = True,
    ) -> None:
        if prefix != "":
            checked_name(prefix, "prefix")
            tagged(re.sub(r"\{[^{}]*$", "", prefix))  # a tag may end in the name, but not be broken already
        self.prefix = prefix
        self.max_ttl = duration(max_ttl, "max_ttl", minimum=MIN_TTL)
        self.try_for = duration(try_for, "try_for", minimum=MIN_TRY_FOR, maximum=MAX_TRY_FOR)
        if label is not None and not re.search(r"\w", label if isinstance(label, str) else ""):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
            raise ConfigError(f"label must be a str with at least one letter or digit, not {label!r}")
        self.label = label
        self.max_connections = positive_int(max_connections, "max_connections", "Interlock", MAX_MAX_CONNECTIONS)
        self.registry = checked_bool(registry, "registry")
        self._address, self._is_quorum = _address_of(target, for_asyncio=self._for_asyncio)
        if not isinstance(quarantine, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
            raise ConfigError(
                f"quarantine must be True or False, not {quarantine!r}; its length is max_ttl, in seconds"
            )
        self.confirm = checked_bool(confirm, "confirm")
        self._histories = Histories(self.max_ttl if quarantine else None)
        self._closed = False
        self._held_by_caller = HeldByCaller()
        self._start()

    @classmethod
    def quorum(
        cls,
        servers: Sequence[str | object],
        *,
        prefix: str = "lock:",
        max_ttl: float = MAX_TTL,
        quarantine: bool = True,
        try_for: float = TRY_FOR,
        label: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        registry: bool = True,
    ) -> Self:
        """Make an Interlock on several servers that share nothing: held is what a majority grants (Redlock).

        `servers` are URLs or clients of 3 or 5 single servers; the options are those of Interlock. It has lock, rlock,
        multi, election, once and synchronized, but no rwlock, semaphore, latch or barrier: servers that do not know
        each other can't agree on a count. Raises ConfigError; at the first use also if a server is there twice.
        """
        from interlock._connect.target import quorum_of  # noqa: PLC0415 (see _address_of)

        members = quorum_of(servers, for_asyncio=cls._for_asyncio)
        return cls(
            members,
            prefix=prefix,
            max_ttl=max_ttl,
            quarantine=quarantine,
            try_for=try_for,
            label=label,
            max_connections=max_connections,
            registry=registry,
        )

    def _lock(
        self,
        name: str,
        *,
        ttl: float = DEFAULT_TTL,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        fair: bool = False,
        confirm: bool | None = None,
        max_waiters: int | None = None,
        on_lost: Callable[[LeaseT], object] | None = None,
        acks: int | Literal["majority", "all"] | None = None,
        fsync: bool = False,
    ) -> tuple[Any, ...]:
        """Exclude all others that lock this name, on every machine. Not reentrant.

        Args:
            name: 1 to 512 bytes, without control characters.
            ttl: seconds after which the lock of a dead holder is free: 30, or max_ttl if that is less. The lease of a
                living holder is renewed every ttl/3.
            timeout: seconds to wait for it; None waits for ever, 0 does not wait.
            renew: False makes a lease that ends after ttl in any case.
            max_hold: seconds after which a holder loses the lock, even if it is alive.
            fair: True keeps strict order of arrival over all processes. False lets callers of this process go one after
                another, for 10 ms and 64 sections at most while others wait: many times faster.
            confirm: False leaves a `with` without waiting for the server's reply to the release, which saves a round
                trip. With True a `with` raises LeaseLost also if only the server knew that the lease had ended, and so
                can roll back a transaction around it. None: as the Interlock says. Sentinel and a cluster wait anyway.
            max_waiters: a caller that would have to wait while so many wait already gets AcquireTimeout at once. None:
                any number may wait.
            on_lost: called with the lease when it is lost: in a thread of its own; in asyncio in the loop, and awaited
                if it is an `async def`.
            acks: how many replicas must have the grant, so that it counts: a number, "majority" (of server and
                replicas), or "all"; of the most that there were. Else it is undone, and Unavailable raised.
            fsync: the grant must be on the disk of the server, and of so many replicas (Redis 7.2, Valkey).

        Raises ConfigError. Nothing is sent until it is acquired.

        """
        options = self._checked(
            ttl=ttl,
            timeout=timeout,
            renew=renew,
            max_hold=max_hold,
            fair=fair,
            confirm=confirm,
            max_waiters=max_waiters,
            on_lost=on_lost,
            acks=acks,
            fsync=fsync,
        )
        return self, lock.lock_resource(name, self.prefix), shared(options, joins=True)

    def _rlock(self, name: str, *, owner: str | None = None, **options: Unpack[OptionsOf[LeaseT]]) -> tuple[Any, ...]:
        """Exclude all others, but let the holder enter again: the same thread or task, without I/O and with one fence.

        The same lock as `lock(name)`, and the same options. `owner` names a holder that is not a thread or task: a
        caller with the same `owner`, in another process or after a restart, takes the lease over, with a new fence, and
        the holder before has lost it. Two threads or tasks of one process that use it at the same moment may do that to
        each other. Raises ConfigError. Nothing is sent until it is acquired.
        """
        resource = lock.lock_resource(name, self.prefix, lock.owner_prefix(owner))
        return self, resource, shared(self._checked(**options), joins=owner is None)

    def _rwlock(self, name: str, **options: Unpack[OptionsOf[LeaseT]]) -> tuple[Any, ...]:
        """Allow many readers, `.read()`, or one writer, `.write()`: in order of arrival, so that neither starves.

        Options as for `lock()`; each reader has a lease of its own. Raises ConfigError.
        """
        return self, permits.read_resource(name, self.prefix), self._checked(**options)

    def _semaphore(self, name: str, limit: int, **options: Unpack[OptionsOf[LeaseT]]) -> tuple[Any, ...]:
        """Allow up to `limit` permits at a time, over all processes; in order of arrival. Options as for `lock()`.

        Permits are leased, so a crash gives them back. The server keeps the limit: a client that asks with another one
        gets a ConfigError. Raises ConfigError. Nothing is sent until it is acquired.
        """
        return self, permits.semaphore_resource(name, self.prefix, limit), self._checked(**options)

    def _multi(
        self,
        *lockables: MemberT,
        timeout: float | None = None,
        on_lost: Callable[[MultiLeaseT], object] | None = None,
    ) -> tuple[Any, ...]:
        """Acquire all of these or none, without deadlock, in whatever order they are named here or elsewhere.

        Each is held with its own options (ttl, renew, max_hold); `timeout` (seconds) is for all together, and `on_lost`
        is called (asyncio: or awaited) with the lease over all when any is lost. Raises ConfigError. Nothing is sent
        until it is acquired.
        """
        return self, checked_members(self, lockables), self._checked(timeout=timeout, on_lost=on_lost)

    def _latch(self, name: str, count: int, *, ttl: float = 3600.0) -> tuple[Any, ...]:
        """Count down to zero, once: callers that wait for that go on, and callers that arrive later do not wait.

        The first caller sets the count. The server forgets it `ttl` seconds after it was last used. Raises ConfigError.
        Nothing is sent until it is used.
        """
        self._check_not_closed()
        return self, latch.latch_resource(name, self.prefix, count, ttl)

    def _barrier(self, name: str, parties: int) -> tuple[Any, ...]:
        """Make so many parties wait for each other, and go on together; again and again. Raises ConfigError."""
        self._check_not_closed()
        return self, barrier.barrier_resource(name, self.prefix, parties)

    def _election(self, name: str, **options: Unpack[OptionsOf[LeaseT]]) -> tuple[Any, ...]:
        """Let one of many processes lead, until it dies, loses its lease, or resigns. Options as for `lock()`.

        A dead leader is replaced within ttl + 1 s. Raises ConfigError. Nothing is sent until it is used.
        """
        if options.get("confirm") is False:
            raise ConfigError("an election takes no confirm=False: resign() waits until the server has replied")
        options["confirm"] = True
        return self, election.election_resource(name, self.prefix), self._checked(**options)

    def _once(
        self,
        name: str | Callable[..., str],
        *,
        at_most: float,
        at_least: float = 0.0,
        key: str | Callable[..., str] | None = None,
        keep: float = MONTH,
    ) -> tuple[Any, ...]:
        """Run work on one machine only: the others skip it.

        Args:
            name: of the work.
            at_most: seconds that the work may take. Then its runner has lost it, and another run may begin.
            at_least: seconds after its start before which no other run begins, however fast it was.
            key: the work runs once for each key, as a date or a version; a run that failed is repeated.
            keep: seconds for which the server remembers that the run for a key has succeeded.

        In a decorator `name` and `key` may be formats of the call's arguments, as in "report:{region}". Each may be a
        function, which takes arguments of the call by their names: `key=lambda: str(date.today())`.
        The run of a process that died is free again after 30 s (or `at_most`, if that is less). Raises ConfigError.

        """
        if key is None and keep != MONTH:
            raise ConfigError("keep says for how long the run for a key is remembered: give a key=, too")
        limits = once.RunLimits(at_most, at_least, keep, keyed=key is not None, max_ttl=self.max_ttl)
        options = self._checked(ttl=limits.ttl, max_hold=limits.at_most, confirm=True)
        resource, source = run_source(name, self.prefix, key)
        return self, resource, options, limits, source

    def _synchronized(
        self,
        name: str | Callable[..., str],
        *,
        busy: object = "wait",
        **options: Unpack[OptionsOf[LeaseT]],
    ) -> Callable[[Callable[P, R]], Callable[P, R | Skipped]]:
        """Decorate a function or method: each call runs under the rlock whose name is made of the call's arguments.

        `name` is a format, as in "report:{user_id}" or "shop:{self.id}", or a function that takes arguments of the call
        by their names and returns the name; options as for `lock()`. When it is busy: "wait" (up to `timeout`), "raise"
        AcquireTimeout at once, or "skip": the call returns Skipped, which is false. Any other `busy` is what the call
        returns then; a function is called with the Skipped (asyncio: may be an `async def`) and returns it.
        In asyncio for an `async def`. Raises ConfigError, and so does a call without an argument that the name needs.
        """
        answer, timeout = busy_answer(busy, name, options.get("timeout"), options.get("max_waiters"))
        checked, for_asyncio = self._checked(**options), self._for_asyncio
        checked.joins = checked.may_join

        def decorate(function: Callable[P, R] = NOTHING) -> Callable[P, R | Skipped]:
            names = CallName(name, function, for_asyncio=for_asyncio, prefix=self.prefix)

            async def synchronized(*args: Any, **kwargs: Any) -> Any:
                rlock = self._rlock_type(self, lock.lock_resource(names.of(args, kwargs), self.prefix), checked)
                async with Section(rlock) as section:
                    try:
                        lease = section.lease = await rlock._acquire(timeout)
                    except AcquireTimeout as error:
                        if answer is None:
                            raise
                        skipped = Skipped(rlock.name, error.holder, None, None, quarantined=error.quarantined)
                        answered = answer(skipped)
                        return await answered if for_asyncio and inspect.isawaitable(answered) else answered
                    lease._mark_held_by_call()
                    lease._begin()
                    return await rlock._call(function, *args, **kwargs)

            return decorated(function, synchronized, for_asyncio=for_asyncio)

        decorate.__qualname__ = "Interlock.synchronized"
        return decorate

    async def _ls(self, pattern: str = "*") -> list[Listed]:
        """What all processes on this server hold and wait for, by name: who, since when, and where in their code.

        `pattern` is as in a shell: "stock:*". Each process says so itself, some seconds late, of its 50 oldest leases
        and waiters: for people, not for decisions. One with registry=False says nothing. Raises Unavailable, or
        ConfigError.
        """
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
            raise ConfigError(f"ls(): the pattern must be a str, such as 'stock:*', not {pattern!r}")
        session: Session = cast("Any", self)._session
        return await session.registry.read(pattern)

    async def _ping(self) -> float:
        """Ask the server as a lock does, and return the seconds until its reply: is it there, and how fast?

        Raises Unavailable, or ConfigError if the server refuses what a lock needs. A cluster: asks one node.
        """
        session: Session = cast("Any", self)._session
        core = session.core
        question = lock.lock_resource("ping", self.prefix)._replace(kind="question")  # no lock, for errors
        asked = core.runtime.now()
        await core.query(question, *InspectCall("0").encode())
        return core.runtime.now() - asked

    async def _close(self) -> None:
        """Release all that is held, end all waiting, close the connections. Takes about a second at the most.

        In asyncio: of the running loop. Safe to repeat.
        """
        session = self._last_session()
        self._closed = True
        await self._end(session)

    @staticmethod
    async def _end(session: Session | None) -> None:
        """Close what _last_session() returned. Safe to repeat."""
        if session is not None:
            try:
                await session.close()
            finally:
                await session.server.close()
                await session.runtime.close()

    def _start(self) -> None:
        """Make what a session needs; nothing is sent."""
        raise NotImplementedError

    def _last_session(self) -> Session | None:
        """What is to be closed now."""
        raise NotImplementedError

    @staticmethod
    def _current_owner() -> Any:
        """The thread or the task that runs now."""
        raise NotImplementedError

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigError("this Interlock is closed. Make a new one")

    def _require_supported(self, kind: str) -> None:
        """Raises ConfigError for what the servers of this Interlock can't do."""
        if self._is_quorum and kind not in ON_A_QUORUM:
            raise ConfigError(
                f"a quorum has no {kind}: its servers agree on one holder, not on a count. It has "
                f"{', '.join(ON_A_QUORUM)} and synchronized; for {kind}() use one server, Sentinel, or a cluster"
            )

    def _checked(
        self,
        *,
        ttl: float = DEFAULT_TTL,
        acks: int | str | None = None,
        fsync: bool = False,
        max_waiters: int | None = None,
        confirm: bool | None = None,
        **options: Any,
    ) -> AcquireOptions:
        """The options of a lockable. Raises ConfigError."""
        self._check_not_closed()
        if ttl is DEFAULT_TTL:  # not given: no more than there may be
            ttl = min(ttl, self.max_ttl)
        else:
            checked_ttl(ttl, self.max_ttl)
        wanted = checked_acks(acks, fsync) if acks is not None or fsync is not False else None
        if wanted is not None and self._is_quorum:
            raise ConfigError(
                "a quorum takes no acks= and no fsync=: each of its leases has the grant of a majority of its servers. "
                "Leave them out"
            )
        confirm = self._checked_confirm(confirm, wanted)
        try:
            checked = AcquireOptions(float(ttl), wanted, confirm=confirm, **options)
        except TypeError as error:  # an option that there is not: name the method that the user called
            unexpected, called = str(error).partition("()")[2], sys._getframe(1).f_code.co_name.lstrip("_")
            raise advised(TypeError(f"Interlock.{called}(){unexpected}")) from None
        for option in ("renew", "fair"):
            if not isinstance(value := getattr(checked, option), bool):
                raise ConfigError(f"{option} must be True or False, not {value!r}")
        timeout_of(checked.timeout)
        if checked.max_hold is not None:
            duration(checked.max_hold, "max_hold", minimum=MIN_TTL)
        if max_waiters is not None:
            checked.max_waiters = str(positive_int(max_waiters, "max_waiters", "", MAX_MAX_WAITERS))
        if checked.on_lost is not None:
            self._check_on_lost(checked.on_lost)
        return checked

    def _check_on_lost(self, on_lost: object) -> None:
        if not callable(on_lost):
            raise ConfigError(f"on_lost must be callable with the lease, not {on_lost!r}")
        if not self._for_asyncio and inspect.iscoroutinefunction(on_lost):
            raise ConfigError(
                f"on_lost: {name_of(on_lost)} is an `async def`, which threads would not await. Give a plain function"
            )

    def _checked_confirm(self, confirm: bool | None, wanted: Acks | None) -> bool:
        """Whether the end of a `with` waits for the reply to its release. Raises ConfigError if it can't do without."""
        if confirm is None:
            return self.confirm or wanted is not None
        if checked_bool(confirm, "confirm"):
            return True
        if self._is_quorum:
            raise ConfigError(
                "a quorum takes no confirm=False: a majority of its servers must have the release. Leave confirm out"
            )
        if wanted is not None:
            option = "fsync=True" if wanted.fsync else f"acks={wanted.number!r}"
            raise ConfigError(
                f"confirm=False and {option} contradict each other: one waits for less than the server's reply, the "
                "other for more. Leave one of them out"
            )
        return False

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.Interlock {self._address.display_url}{' closed' if self._closed else ''}>"


def _address_of(target: object, *, for_asyncio: bool) -> tuple[Address | Cluster | Quorum, bool]:
    """What the user named, as an address; and whether that is a quorum. Raises ConfigError.

    All that knows redis-py is imported with the first Interlock, since redis-py takes longer to import than interlock.
    """
    from interlock._connect.address import Quorum  # noqa: PLC0415
    from interlock._connect.target import address_of  # noqa: PLC0415

    return (target, True) if isinstance(target, Quorum) else (address_of(target, for_asyncio=for_asyncio), False)
