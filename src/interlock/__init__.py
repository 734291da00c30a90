"""interlock: distributed locks for Python, on Redis and Valkey. For asyncio: `from interlock.aio import Interlock`."""

from __future__ import annotations

from .errors import AcquireTimeout, ConfigError, LeaseLost, LockError, Unavailable
from .threads import Holder, Interlock, Lease, LeaseState, Lock, PermitState, RLock, RWLock, RWSide, Semaphore, State

__all__ = [
    "AcquireTimeout",
    "ConfigError",
    "Holder",
    "Interlock",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "Lock",
    "LockError",
    "PermitState",
    "RLock",
    "RWLock",
    "RWSide",
    "Semaphore",
    "State",
    "Unavailable",
]
__version__ = "0.1.0"
