"""The errors of `redis_lock` for processes without python-redis-lock: the same names and bases."""


class AlreadyAcquired(RuntimeError):  # noqa: N818 (here and below: the names are python-redis-lock's)
    """The key has the id of this lock already."""


class NotAcquired(RuntimeError):  # noqa: N818
    """The key does not have the id of this lock: it was not acquired, or it has expired."""


class AlreadyStarted(RuntimeError):  # noqa: N818
    """The renewal of this lock runs already. Only kept for code that names this class: nothing here raises it."""


class TimeoutNotUsable(RuntimeError):  # noqa: N818
    """A timeout was given to a call that does not wait."""


class InvalidTimeout(RuntimeError):  # noqa: N818
    """The timeout is negative."""


class TimeoutTooLarge(RuntimeError):  # noqa: N818
    """The timeout is longer than the expire of a lock without renewal."""


class NotExpirable(RuntimeError):  # noqa: N818
    """The key has no time at which it expires."""
