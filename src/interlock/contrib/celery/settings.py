"""Where the locks of an app are, and what a worker checks of that before it starts.

Rules. (a) No server is guessed. A web process and a worker that guess differently lock on two servers, and each of
them succeeds; so an app without `interlock_url` and without $INTERLOCK_URL has no locks, and says so at its start. (b)
What is wrong for ever ends the worker at its start; a server that is away does not, and is logged once.
"""

# Celery has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false, reportMissingTypeStubs=false

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import signals

from interlock import Interlock
from interlock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

logger: Final = logging.getLogger("interlock.celery")
_LOCKS: Final = "_interlock_locks"  # the attribute of an app; vars().setdefault() is one step for all threads
_in_use: Final[list[Interlock]] = []

checks: Final[list[Callable[[Interlock], object]]] = []
"""Called with the locks of a worker's app before the worker starts: each raises ConfigError for what can't work."""


def locks_of(app: Celery) -> Interlock:
    """Return the Interlock of this app, which its tasks share: made of `interlock_url` and `interlock_options`.

    `interlock_url` is a URL, or a list of URLs for a quorum; by default $INTERLOCK_URL. `interlock_options` is a dict
    of the other arguments of Interlock, such as {"prefix": "shop:"}. Raises ConfigError.
    """
    if _LOCKS not in vars(app):
        made = _made(app)
        if vars(app).setdefault(_LOCKS, made) is made:
            _in_use.append(made)
    found: Interlock = vars(app)[_LOCKS]
    return found


def setting(app: Celery, name: str, default: object = None) -> Any:
    """A setting of the app by its name, whatever namespace the app gave its settings."""
    value = app.conf.get(name)
    return default if value is None else value


def _made(app: Celery) -> Interlock:
    url = setting(app, "interlock_url") or os.environ.get("INTERLOCK_URL")
    options = setting(app, "interlock_options", {})
    if not url:
        raise ConfigError(_advice(app))
    if not isinstance(options, Mapping):
        raise ConfigError(f"interlock_options must be a dict, such as {{'prefix': 'shop:'}}, not {options!r}")
    options = dict[str, Any]({"label": app.main or "celery", **options})
    try:
        return Interlock.quorum(url, **options) if isinstance(url, list | tuple) else Interlock(url, **options)
    except ConfigError as error:
        raise ConfigError(f"interlock_url of {_name(app)}: {error}") from None
    except TypeError as error:
        raise ConfigError(f"interlock_options of {_name(app)}: {error}") from None


def _advice(app: Celery) -> str:
    """Why an app has no locks, and what to write."""
    broker = app.connection_for_write()
    what = f"{_name(app)} does not say where its locks are"
    if broker.transport_cls in {"redis", "rediss", "sentinel"}:
        return (
            f"{what}. If they shall be where its broker is ({broker.as_uri()}): app.conf.interlock_url = "
            "app.conf.broker_url. Else name their server there, or in $INTERLOCK_URL"
        )
    return (
        f"{what}, and its broker ({broker.as_uri()}) can't have any: locks need Redis or Valkey. Name such a server: "
        'app.conf.interlock_url = "redis://...", or $INTERLOCK_URL'
    )


def _name(app: Celery) -> str:
    return f"the Celery app {app.main!r}" if app.main else "the Celery app"


@signals.worker_init.connect  # type: ignore[untyped-decorator]  # Celery has no types
def check_before_start(sender: Any, **_: object) -> None:
    """End a worker whose tasks can't have their locks; log it if the server of the locks is away."""
    if not checks:
        return
    try:
        locks = locks_of(sender.app)
        for check in checks:
            check(locks)
        with _made(sender.app) as probe:  # one of its own: no thread of it is left when the pool forks
            probe.ping()
    except ConfigError as error:
        raise SystemExit(f"interlock.contrib.celery: {error}") from None  # Celery logs any other error, and goes on
    except Unavailable as error:
        logger.warning("The server of the locks is away: %s. Until it answers, no task with a lock runs", error)


@signals.worker_process_shutdown.connect  # type: ignore[untyped-decorator]  # Celery has no types
def close_in_child(**_: object) -> None:
    """Close the Interlocks of a process of the pool, which ends without running Python's exit handlers."""
    for each in _in_use:
        each.close()
