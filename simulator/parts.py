"""What the parts of a run see of each other, as protocols.

A run makes its clients, its faults and its outages, and a client makes its workers. Each part also uses the one that
made it, which it can't import. What subjects see of a run is in `subjects.seen`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock import aio
    from interlock._protocol.types import Server
    from interlock._session.session import Session

    from .coroutines import Process, Task
    from .invariants import Monitor, Trace
    from .network import Network
    from .plan import Record
    from .profiles import Profile
    from .scheduler import World
    from .sim_server import SimServer
    from .subjects import Subject


class Run(Protocol):
    """One simulation: see `scenario`."""

    execute_count: int

    @property
    def world(self) -> World: ...
    @property
    def profile(self) -> Profile: ...
    @property
    def networks(self) -> list[Network]: ...
    @property
    def monitor(self) -> Monitor: ...
    @property
    def record(self) -> Record: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def subject(self) -> Subject: ...
    @property
    def clients(self) -> Sequence[Client]: ...

    @property
    def ending(self) -> bool:
        """Whether workers begin no further section."""
        ...

    @property
    def gap(self) -> float:
        """Seconds between two sections of a worker, on average."""
        ...

    def replace(self, client: Client, strike: int) -> None:
        """Replace a dead process by a new one."""
        ...

    def restore_twice(self, client: Client, strike: int) -> None:
        """Replace a process by two that are restored from its snapshot."""
        ...


class Client(Protocol):
    """One process with a session and its workers: see `clients`."""

    @property
    def run(self) -> Run: ...
    @property
    def name(self) -> str: ...
    @property
    def process(self) -> Process: ...
    @property
    def server(self) -> Server: ...
    @property
    def servers(self) -> Sequence[SimServer]: ...
    @property
    def session(self) -> Session: ...
    @property
    def locks(self) -> aio.Interlock: ...
    @property
    def known_limits(self) -> dict[str, Any]: ...
    @property
    def workers(self) -> list[Task]: ...
    @property
    def closing(self) -> Task | None: ...

    @property
    def idle(self) -> bool:
        """Whether the client holds nothing, waits for nothing, and has nothing to give back."""
        ...

    def close(self) -> None:
        """Close the session as a program does, and release all leases."""
        ...

    def start_foreign_code(self, beside: Task, lease: Any = None) -> None:
        """Start code that the worker does not know of, as the profile has it: it takes a turn, or uses the lease."""
        ...
