"""What the parts of a run see of each other, as protocols.

A run makes its clients, its faults and its outages, and a client makes its workers. Each part also uses its maker,
whose module it can't import. What subjects see of a run is in `subjects.seen`; here is the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .subjects import seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.server import Server

    from .coroutines import Task
    from .invariants import Monitor
    from .network import Network
    from .plan import Record
    from .scheduler import World
    from .sim_server import SimServer
    from .subjects import Subject


class Run(seen.Run, Protocol):
    """One simulation: see `scenario`."""

    execute_count: int

    @property
    def world(self) -> World: ...
    @property
    def networks(self) -> list[Network]: ...
    @property
    def monitor(self) -> Monitor: ...
    @property
    def record(self) -> Record: ...
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


class Client(seen.Client, Protocol):
    """One process with a session and its workers: see `clients`."""

    @property
    def run(self) -> Run: ...
    @property
    def name(self) -> str: ...
    @property
    def server(self) -> Server: ...
    @property
    def servers(self) -> Sequence[SimServer]: ...
    @property
    def workers(self) -> list[Task]: ...

    @property
    def idle(self) -> bool:
        """Whether the client holds nothing, waits for nothing, and has nothing to give back."""
        ...

    def close(self) -> None:
        """Close the session as a program does, and release all leases."""
        ...

    def start_foreign_code(self, beside: Task, lease: Any = None) -> None:
        """Perhaps start code that the worker does not know of (`Profile.foreign`): it takes a turn, or uses `lease`."""
        ...
