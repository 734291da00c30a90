"""The drop-in under the name of python-redis-lock, for that library's tests and the programs that these start.

The tests read in the log of a program what it does; so the drop-in writes these lines here as the original does.
"""

import logging

from interlock.compat import redis_lock
from interlock.compat.redis_lock import *  # noqa: F403

log = logging.getLogger(__name__)


class Lock(redis_lock.Lock):
    def acquire(self, *args, **kwargs):
        log.debug("Acquiring Lock(%r) ...", self._name)
        is_acquired = super().acquire(*args, **kwargs)
        log.info("Acquired Lock(%r)." if is_acquired else "Failed to acquire Lock(%r).", self._name)
        return is_acquired

    def release(self):
        log.debug("Releasing Lock(%r).", self._name)
        super().release()
