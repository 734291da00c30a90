"""interlock: distributed locks for Python, on Redis and Valkey. For asyncio: `from interlock.aio import Interlock`."""

from __future__ import annotations

from .errors import AcquireTimeout, BrokenBarrier, ConfigError, Deadlock, LeaseLost, LockError, NotHeld, Unavailable
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
    Listed,
    Lock,
    LockState,
    MultiLease,
    MultiLock,
    Once,
    OnceState,
    Options,
    Party,
    Ran,
    ReadLock,
    RLock,
    RWLock,
    Semaphore,
    SemaphoreState,
    Skipped,
    WriteLock,
)

__all__ = [
    "AcquireTimeout", "Assurance", "Barrier", "BarrierState", "BrokenBarrier", "ConfigError", "Deadlock", "Election",
    "Holder", "Interlock", "Latch", "LatchState", "Leader", "Leadership", "Lease", "LeaseLost", "LeaseState",
    "Listed", "Lock", "LockError", "LockState", "MultiLease", "MultiLock", "NotHeld", "Once", "OnceState", "Options",
    "Party", "RLock", "RWLock", "Ran", "ReadLock", "Semaphore", "SemaphoreState", "Skipped", "Unavailable", "WriteLock",
]  # fmt: skip
__version__ = "0.1.0"
