"""`locks` and `alocks`: an Interlock for each alias of the settings, made when it is first used.

Theory. An Interlock is safe to share between threads, connects at its first use, and a child made by fork connects
anew. So one for each alias and process is enough. Importing `locks` reads no settings and connects to nothing: a server
may load the project, fork (gunicorn `--preload`), and only then work.

Rules. (a) Nothing here holds a mutex, which a fork could leave locked: of two threads that make the same Interlock at
once, the second one's is dropped before it has connected. (b) When a test changes the settings, the Interlocks of
before are forgotten and not closed, since functions that they decorate still use them.
"""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, Unpack, overload

from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS, router
from django.db.models import Model

from interlock import aio, threads
from interlock.errors import ConfigError

from .names import name_of
from .settings import DEFAULT, alias_of, make
from .transactions import UntilCommit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AsyncInterlock", "Interlock", "alocks", "locks"]


class Interlock(threads.Interlock):
    """Locks of one alias: an `interlock.Interlock` whose locks can also be named by model instances."""

    @overload
    def lock(
        self,
        name: str | Model,
        *,
        until_commit: Literal[False] = False,
        using: None = None,
        **options: Unpack[threads.Options],
    ) -> threads.Lock: ...
    @overload
    def lock(
        self,
        name: str | Model,
        *,
        until_commit: Literal[True],
        using: str | None = None,
        **options: Unpack[threads.Options],
    ) -> UntilCommit: ...
    def lock(
        self,
        name: str | Model,
        *,
        until_commit: bool = False,
        using: str | None = None,
        **options: Unpack[threads.Options],
    ) -> threads.Lock | UntilCommit:
        """As `interlock.Interlock.lock`, for a name or a model instance; see `name_of`.

        With `until_commit` the lease outlives the `with` for as long as a transaction of the database `using` is open,
        and ends after its commit or rollback: see `UntilCommit`. `using` is an alias of DATABASES, by default the one
        to which the instance would be saved. Raises ConfigError. Nothing is sent until it is acquired.
        """
        if until_commit:
            return UntilCommit(super().rlock(name_of(name), **options), using or _database_of(name))
        if using is not None:
            raise ConfigError(f"lock({name!r}): `using` says whose commit is meant: give until_commit=True, too")
        return super().lock(name_of(name), **options)

    def rlock(
        self, name: str | Model, *, owner: str | None = None, **options: Unpack[threads.Options]
    ) -> threads.RLock:
        """As `interlock.Interlock.rlock`, for a name or a model instance."""
        return super().rlock(name_of(name), owner=owner, **options)

    def rwlock(self, name: str | Model, **options: Unpack[threads.Options]) -> threads.RWLock:
        """As `interlock.Interlock.rwlock`, for a name or a model instance."""
        return super().rwlock(name_of(name), **options)

    def semaphore(self, name: str | Model, limit: int, **options: Unpack[threads.Options]) -> threads.Semaphore:
        """As `interlock.Interlock.semaphore`, for a name or a model instance."""
        return super().semaphore(name_of(name), limit, **options)

    def assert_held(self, name: str | Model) -> threads.Lease:
        """As `interlock.Interlock.assert_held`, for a name or a model instance."""
        return super().assert_held(name_of(name))


class AsyncInterlock(aio.Interlock):
    """Locks of one alias for asyncio: an `interlock.aio.Interlock` whose locks can be named by model instances.

    It has no `until_commit`: Django's transactions are of threads.
    """

    def lock(self, name: str | Model, **options: Unpack[aio.Options]) -> aio.Lock:
        """As `interlock.aio.Interlock.lock`, for a name or a model instance."""
        return super().lock(name_of(name), **options)

    def rlock(self, name: str | Model, *, owner: str | None = None, **options: Unpack[aio.Options]) -> aio.RLock:
        """As `interlock.aio.Interlock.rlock`, for a name or a model instance."""
        return super().rlock(name_of(name), owner=owner, **options)

    def rwlock(self, name: str | Model, **options: Unpack[aio.Options]) -> aio.RWLock:
        """As `interlock.aio.Interlock.rwlock`, for a name or a model instance."""
        return super().rwlock(name_of(name), **options)

    def semaphore(self, name: str | Model, limit: int, **options: Unpack[aio.Options]) -> aio.Semaphore:
        """As `interlock.aio.Interlock.semaphore`, for a name or a model instance."""
        return super().semaphore(name_of(name), limit, **options)

    def assert_held(self, name: str | Model) -> aio.Lease:
        """As `interlock.aio.Interlock.assert_held`, for a name or a model instance."""
        return super().assert_held(name_of(name))


def _database_of(thing: str | Model) -> str:
    """The alias of the database to which this would be saved."""
    return router.db_for_write(type(thing), instance=thing) if isinstance(thing, Model) else DEFAULT_DB_ALIAS


InterlockT = TypeVar("InterlockT", Interlock, AsyncInterlock)


class Aliases(Generic[InterlockT]):
    """The Interlocks of this process by alias. All other attributes are those of the default one."""

    def __init__(self, name: str, kind: type[InterlockT]) -> None:
        self._name = name
        self._kind: Callable[..., InterlockT] = kind
        self._made: dict[str, InterlockT] = {}

    def __getitem__(self, alias: str) -> InterlockT:
        made = self._made.get(alias)
        return made if made is not None else self._made.setdefault(alias, make(self._kind, alias_of(alias)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying, pickling and doctests ask for is not there
            raise AttributeError(name)
        return getattr(self[DEFAULT], name)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._kind) if not name.startswith("_")]

    def __repr__(self) -> str:
        return f"<interlock.contrib.django.{self._name}>"

    def forget(self) -> None:
        """Forget them: the next use of each alias makes its Interlock anew, of the settings of that time."""
        self._made.clear()


_locks: Final = Aliases[Interlock]("locks", Interlock)
_alocks: Final = Aliases[AsyncInterlock]("alocks", AsyncInterlock)


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting in {"INTERLOCK", "CACHES"}:
        _locks.forget()
        _alocks.forget()


setting_changed.connect(_on_setting_changed, dispatch_uid="interlock")

if TYPE_CHECKING:

    class Locks(Interlock):
        """What `locks` is for type checkers: the Interlock of the default alias, and the others by `locks[alias]`."""

        def __getitem__(self, alias: str) -> Interlock: ...

    class AsyncLocks(AsyncInterlock):
        """What `alocks` is for type checkers."""

        def __getitem__(self, alias: str) -> AsyncInterlock: ...

    locks: Locks
    alocks: AsyncLocks
else:
    locks, alocks = _locks, _alocks
