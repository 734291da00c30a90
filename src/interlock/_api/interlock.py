"""The Interlock: where the locks are, and what makes them."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from interlock._client.grant import AcquireOptions, shared
from interlock._client.reentrancy import HeldByCaller
from interlock._client.self_wait import kind_of_caller
from interlock._protocol.acks import checked_acks
from interlock._protocol.forks import KNOWN, notice
from interlock._protocol.names import (
    MIN_TTL,
    checked_bool,
    checked_name,
    checked_ttl,
    duration,
    positive_int,
    tagged,
)
from interlock._protocol.retry_for import RetryFor, checked_retry_for
from interlock._protocol.timing import DEFAULT_TTL
from interlock._protocol.unset import Unset
from interlock._quarantine.server_histories import Histories
from interlock._session.session import Session
from interlock.errors import AcquireTimeout, ConfigError
from interlock.primitives import barrier, election, latch, lock, once, permits
from interlock.primitives.kinds import KINDS
from interlock.primitives.messages import InspectCall
from interlock.primitives.once import Skipped

from . import inside, live
from .face import Face
from .functions import name_of
from .lease import LeaseState
from .misuse_errors import INTERLOCK_HINTS, advised, check_not_shutting_down, not_held
from .multi import checked_members
from .options import timeout_of
from .run_names import run_source
from .section import CallSection
from .synchronized import CallName, busy_answer, decorated

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from interlock._connect.address import Address, Quorum
    from interlock._connect.clusters import Cluster
    from interlock._protocol.acks import Acks
    from interlock._protocol.resource import Resource
    from interlock._protocol.server import Server
    from interlock.primitives.registry import Listed

    from .run_names import RunSource

NOTHING: Final[Any] = None  # in place of an argument that a mistaken call leaves out
MIN_TRY_FOR: Final = 0.01  # seconds: less than a round trip is no try
MAX_TRY_FOR: Final = 3600.0  # seconds
MAX_CONNECTIONS: Final = 64  # to one server, by default
MAX_MAX_CONNECTIONS: Final = 65_535
MAX_MAX_WAITERS: Final = 1_000_000
MONTH: Final = 30 * 86_400.0  # seconds
# What servers that share nothing can agree on.
ON_A_QUORUM: Final = tuple(
    dict.fromkeys(("lock", "rlock", "multi", *(kind.name for kind in KINDS.values() if kind.quorum is not None)))
)


class InterlockCore(Face):
    """Locks on one server; see the docstrings of `Interlock` in `interlock.aio` and `interlock.threads`."""

    _instead_of_pickling = "make it in each process, of the same URL"
    _hints = INTERLOCK_HINTS
    _for_asyncio: ClassVar[bool]
    _rlock_type: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        target: object,
        *,
        prefix: str,
        max_ttl: float,
        quarantine: bool,
        confirm: bool,
        try_for: float,
        retry_for: RetryFor,
        label: str | None,
        max_connections: int,
        registry: bool,
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
        check_not_shutting_down()
        self._address, self._is_quorum = _address_of(target, for_asyncio=self._for_asyncio)
        self.retry_for = self._address.given_retry_for if isinstance(retry_for, Unset) else checked_retry_for(retry_for)
        if not isinstance(quarantine, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
            raise ConfigError(
                f"quarantine must be True or False, not {quarantine!r}; its length is max_ttl, in seconds"
            )
        self.confirm = checked_bool(confirm, "confirm")
        self._histories = Histories(self.max_ttl if quarantine else None)
        self._closed = False
        self._held_by_caller = HeldByCaller()
        live.look(self._address.display_url)
        self._start()

    @classmethod
    def _members_of(cls, servers: object) -> Quorum:
        """The servers of a quorum. Raises ConfigError."""
        from interlock._connect.target import quorum_of  # noqa: PLC0415 (see _address_of)

        return quorum_of(servers, for_asyncio=cls._for_asyncio)

    # What a lockable, a latch or a barrier is made of. Raises ConfigError.

    def _lock(self, name: str, options: AcquireOptions) -> tuple[Resource, AcquireOptions]:
        return lock.lock_resource(name, self.prefix), shared(options, joins=True)

    def _rlock(self, name: str, owner: str | None, **options: Any) -> tuple[Resource, AcquireOptions]:
        resource = lock.lock_resource(name, self.prefix, lock.owner_prefix(owner))
        return resource, shared(self._checked(**options), joins=owner is None)

    def _rwlock(self, name: str, **options: Any) -> tuple[Resource, AcquireOptions]:
        return permits.read_resource(name, self.prefix), self._checked(**options)

    def _semaphore(self, name: str, limit: int, **options: Any) -> tuple[Resource, AcquireOptions]:
        return permits.semaphore_resource(name, self.prefix, limit), self._checked(**options)

    def _multi(
        self, lockables: tuple[Any, ...], timeout: float | None, on_lost: Callable[..., object] | None
    ) -> tuple[tuple[Any, ...], AcquireOptions]:
        return checked_members(self, lockables), self._checked(timeout=timeout, on_lost=on_lost)

    def _latch(self, name: str, count: int, ttl: float) -> Resource:
        self._check_not_closed()
        return latch.latch_resource(name, self.prefix, count, ttl)

    def _barrier(self, name: str, parties: int) -> Resource:
        self._check_not_closed()
        return barrier.barrier_resource(name, self.prefix, parties)

    def _election(self, name: str, **options: Any) -> tuple[Resource, AcquireOptions]:
        if options.get("confirm") is False:
            raise ConfigError("an election takes no confirm=False: resign() waits until the server has replied")
        options["confirm"] = True
        return election.election_resource(name, self.prefix), self._checked(**options)

    def _once(
        self,
        name: str | Callable[..., str],
        *,
        at_most: float,
        at_least: float,
        key: str | Callable[..., str] | None,
        keep: float,
        ttl: float = DEFAULT_TTL,
    ) -> tuple[Resource, AcquireOptions, once.RunLimits, RunSource]:
        if key is None and keep != MONTH:
            raise ConfigError("keep says for how long the run for a key is remembered: give a key=, too")
        limits = once.RunLimits(at_most, at_least, keep, keyed=key is not None, max_ttl=self.max_ttl)
        options = self._checked(ttl=min(limits.ttl, ttl), max_hold=limits.at_most, confirm=True)
        resource, source = run_source(name, self.prefix, key)
        return resource, options, limits, source

    def _synchronized(self, name: str | Callable[..., str], busy: object, **options: Any) -> Callable[..., Any]:
        answer, timeout = busy_answer(busy, name, options.get("timeout"), options.get("max_waiters"))
        checked, for_asyncio = self._checked(**options), self._for_asyncio
        checked.joins = checked.may_join

        def decorate(function: Callable[..., Any] = NOTHING) -> Callable[..., Any]:
            names = CallName(name, function, for_asyncio=for_asyncio, prefix=self.prefix)

            async def synchronized(*args: Any, **kwargs: Any) -> Any:
                rlock = self._rlock_type(self, lock.lock_resource(names.of(args, kwargs), self.prefix), checked)
                async with CallSection(rlock) as section:
                    try:
                        lease = section.lease = await rlock._acquire(timeout)
                    except AcquireTimeout as error:
                        if answer is None:
                            raise
                        skipped = Skipped(rlock.name, error.holder, None, None, quarantined=error.quarantined)
                        answered = answer(skipped)
                        return await answered if for_asyncio and inspect.isawaitable(answered) else answered
                    lease._mark_in_with(section)
                    lease._begin()
                    return await rlock._call(function, *args, **kwargs)

            return decorated(function, synchronized, for_asyncio=for_asyncio)

        decorate.__qualname__ = "Interlock.synchronized"
        return decorate

    def _assert_held(self, name: object) -> Any:
        checked, caller = checked_name(name), self._current_owner()
        if not KNOWN[0]:
            notice()
        entered = inside.leases_of(caller)
        leases = [lease for each in entered for lease in each._leases_of(checked, cast("Any", self)._session.core)]
        for lease in leases:
            if lease.state not in {LeaseState.LOST, LeaseState.RELEASED}:
                return lease
        for lease in leases:
            if lease.state is LeaseState.LOST:
                lease._ensure()
        raise not_held(checked, kind_of_caller(caller), for_asyncio=self._for_asyncio)

    async def _ls(self, pattern: str) -> list[Listed]:
        if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
            raise ConfigError(f"ls(): the pattern must be a str, such as 'stock:*', not {pattern!r}")
        session: Session = cast("Any", self)._session
        return await session.views.ls(session.core, pattern)

    async def _ping(self) -> float:
        session: Session = cast("Any", self)._session
        core = session.core
        question = lock.lock_resource("ping", self.prefix)._replace(kind="question")  # no lock, for errors
        asked = core.runtime.now()
        await core.requests.query(question, *InspectCall("0").encode())
        return core.runtime.now() - asked

    async def _close(self) -> None:
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

    def _session_of(
        self,
        server: Server,
        caller: Callable[[Resource], tuple[str, weakref.ref[Any] | None]],
        exit_connection: Callable[[], Server],
        *,
        frames_to_user: int,
    ) -> Session:
        """Make the session of this server, and give the pushes of the server to it. The arguments are as in Session."""
        session = server.push_handler = Session(
            server,
            self.label,
            caller,
            self.max_ttl,
            exit_connection,
            self.try_for,
            frames_to_user,
            retry_for=self.retry_for,
            registry=self.registry,
        )
        live.note(session, self._histories)
        return session

    def _last_session(self) -> Session | None:
        """The session to close now; None if there is none."""
        raise NotImplementedError

    @staticmethod
    def _current_owner() -> Any:
        """The thread or the task that runs now."""
        raise NotImplementedError

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigError("this Interlock is closed. Make a new one")

    @staticmethod
    def _check_on_a_quorum(kind: str) -> None:
        """Raises ConfigError for what a quorum can't do."""
        if kind not in ON_A_QUORUM:
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
        if ttl is DEFAULT_TTL:  # the user gave no ttl: the default, or max_ttl if that is shorter
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
