"""interlock: distributed locks for Python, on Redis and Valkey. For asyncio: `from interlock.aio import Interlock`."""

from __future__ import annotations

from .errors import AcquireTimeout, ConfigError, LeaseLost, LockError, Unavailable
from .threads import Interlock, Lease, LeaseState, Lock, State

__all__ = [
    "AcquireTimeout",
    "ConfigError",
    "Interlock",
    "Lease",
    "LeaseLost",
    "LeaseState",
    "Lock",
    "LockError",
    "State",
    "Unavailable",
]
__version__ = "0.1.0"
