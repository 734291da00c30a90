"""What a subject sees of its run, as protocols: the modules behind these import the subjects.

A turn sees the worker that plays the turn. The model of a resource sees the attempts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from interlock import aio
    from interlock._client.grant import Grant
    from interlock._session.session import Session
    from simulator.coroutines import Process, Task
    from simulator.invariants.trace import Trace
    from simulator.profiles import Profile
    from simulator.usage import Usage

T = TypeVar("T")


class Attempt(Protocol):
    """The facts about one acquire."""

    @property
    def process(self) -> Process: ...
    @property
    def task(self) -> Task: ...
    @property
    def ended(self) -> bool: ...


class Attempts(Protocol):
    """All attempts of a run."""

    @property
    def known(self) -> Mapping[bytes, Attempt]:
        """By token."""
        ...

    def is_in_cohort(self, token: str, process: Process) -> bool:
        """Whether a caller of this process has this token in its cohort."""
        ...


class Leases(Protocol):
    """All leases of all clients."""

    def note_lease(self, process: Process, grant: Grant) -> None:
        """Note a lease that an acquire returned."""
        ...

    def note_loss(self, lease: Any) -> None:
        """Note that a client reported a lost lease to its holder."""
        ...


class ServerState(Protocol):
    """The states of all resources in the server."""

    @property
    def quiet(self) -> bool:
        """Whether there is no fault of any kind."""
        ...


class Monitor(Protocol):
    """Watches servers and clients."""

    @property
    def attempts(self) -> Attempts: ...
    @property
    def leases(self) -> Leases: ...
    @property
    def server_state(self) -> ServerState: ...


class Run(Protocol):
    """One simulation."""

    @property
    def profile(self) -> Profile: ...
    @property
    def networks(self) -> Sequence[object]: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def monitor(self) -> Monitor: ...


class User(Protocol):
    """A user of the API in one process: a client, or one of its workers."""

    @property
    def session(self) -> Session: ...
    @property
    def locks(self) -> aio.Interlock: ...
    @property
    def known_limits(self) -> dict[str, Any]: ...


class Client(User, Protocol):
    """One process with a session and its workers."""

    @property
    def process(self) -> Process: ...
    @property
    def closing(self) -> Task | None: ...


class Worker(User, Protocol):
    """What a turn uses to call the API: see `simulator.workers`."""

    @property
    def client(self) -> Client: ...
    @property
    def task(self) -> Task: ...
    @property
    def run(self) -> Run: ...
    @property
    def now(self) -> Callable[[], float]: ...

    def options(self, usage: Usage) -> dict[str, Any]:
        """Return the options of a synchronizer for this use."""
        ...

    def count(self, what: str) -> None:
        """Count an event for the summary."""
        ...

    def violated(self, rule: int, text: str) -> None:
        """Report the break of a rule by this worker."""
        ...

    async def sleep(self, until: float) -> None:
        """Sleep until this time of the process's own clock."""
        ...

    async def take(self, acquire: Callable[[], Awaitable[T]], usage: Usage) -> T | None:
        """Acquire a lease, or return None if the API raised an exception that it may raise.

        Passes ConfigError on, unless the session is closed.
        """
        ...

    async def call(
        self,
        call: Callable[[], Awaitable[T]],
        timeout: float | None,
        tokens: Callable[[T], list[str]] = ...,
        what: str = ...,
        undo_graces: int = ...,
    ) -> T | None:
        """Return the result of a call; None if it raised an exception that it may raise."""
        ...

    async def hold(self, lease: Any, usage: Usage, inside: Callable[[], Awaitable[None]] | None = None) -> None:
        """Hold the lease for a while, run `inside`, and release the lease."""
        ...

    async def work_under(self, lease: Any, seconds: float) -> None:
        """Work under the lease for so many seconds."""
        ...

    async def let_go(self, lease: Any, *, exits: bool, error: BaseException | None = None) -> None:
        """Release the lease: as a `with` does (`exits`), or by release()."""
        ...
