"""interlock: distributed locks for Python, on Redis and Valkey. For asyncio: `from interlock.aio import Interlock`."""

from __future__ import annotations

from .errors import AcquireTimeout, BrokenBarrier, ConfigError, LeaseLost, LockError, Unavailable
from .threads import (
    Assurance,
    Barrier,
    BarrierState,
    Election,
    Holder,
    Interlock,
    Latch,
    LatchState,
    Leader,
    Leadership,
    Lease,
    LeaseState,
    Lock,
    Multi,
    MultiLease,
    Once,
    OnceState,
    Options,
    PermitState,
    Ran,
    RLock,
    RWLock,
    RWSide,
    Semaphore,
    Skipped,
    State,
)

__all__ = [
    "AcquireTimeout", "Assurance", "Barrier", "BarrierState", "BrokenBarrier", "ConfigError", "Election", "Holder",
    "Interlock", "Latch", "LatchState", "Leader", "Leadership", "Lease", "LeaseLost", "LeaseState", "Lock",
    "LockError", "Multi", "MultiLease", "Once", "OnceState", "Options", "PermitState", "RLock", "RWLock", "RWSide",
    "Ran", "Semaphore", "Skipped", "State", "Unavailable",
]  # fmt: skip
__version__ = "0.1.0"
