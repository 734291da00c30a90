"""INTERLOCK of the settings: what each alias is, checked. Nothing here connects.

INTERLOCK = {
    "default": {"URL": "redis://localhost:6379/0", "PREFIX": "shop:", "OPTIONS": {"max_ttl": 60}},
    "reports": {"CACHE": "locks"},                       # the server of CACHES["locks"]
    "money": {"QUORUM": ["redis://a", "redis://b", "redis://c"]},
}
"""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["DEFAULT", "Alias", "alias_of", "aliases", "make"]

DEFAULT: Final = "default"
SERVERS: Final = ("URL", "CACHE", "QUORUM")
KEYS: Final = (*SERVERS, "PREFIX", "OPTIONS")
OPTIONS: Final = ("max_ttl", "quarantine", "confirm", "try_for", "retry_for", "label", "max_connections", "registry")
EXAMPLE: Final = 'INTERLOCK = {"default": {"URL": "redis://localhost:6379/0"}}'

InterlockT = TypeVar("InterlockT")


class Alias(NamedTuple):
    """What the settings say of one alias."""

    name: str
    server: str
    """Which of SERVERS says where the locks are; "" if only $INTERLOCK_URL does."""
    target: Any
    prefix: str
    options: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Where it stands in the settings, for people."""
        return f"INTERLOCK[{self.name!r}]"


def aliases() -> list[str]:
    """The aliases of the settings; without the setting, only the default one. Raises ConfigError."""
    return list(_setting())


def alias_of(name: str) -> Alias:
    """What the settings say of this alias. Raises ConfigError."""
    setting = _setting()
    if name not in setting:
        raise ConfigError(f"INTERLOCK has no alias {name!r}. It has {', '.join(map(repr, setting)) or 'none'}")
    entry, place = setting[name], f"INTERLOCK[{name!r}]"
    if not isinstance(entry, dict):
        wrong = type(entry).__name__  # its value may have a password
        raise ConfigError(f"{place} must be a dict with one of {', '.join(SERVERS)}, not {wrong}. Write {EXAMPLE}")
    values: dict[Any, Any] = entry
    _check_known(place, values, KEYS)
    named = [key for key in SERVERS if values.get(key) is not None]
    if len(named) > 1:
        raise ConfigError(f"{place} has {' and '.join(named)}, but its locks have one place. Leave one of them out")
    if not named and not os.environ.get("INTERLOCK_URL"):
        raise ConfigError(f"{place} names no server. Write {EXAMPLE} in the settings, or set $INTERLOCK_URL")
    options = values.get("OPTIONS") or {}
    if not isinstance(options, dict):
        wrong = type(options).__name__
        raise ConfigError(f"{place}['OPTIONS'] must be a dict of the options of an Interlock, not {wrong}")
    _check_known(f"{place}['OPTIONS']", options, OPTIONS)
    server = named[0] if named else ""
    return Alias(name, server, values.get(server), values.get("PREFIX", "lock:"), options)


def make(kind: Callable[..., InterlockT], alias: Alias) -> InterlockT:
    """Make the Interlock of this alias; nothing is sent. Raises ConfigError, which says where in the settings."""
    try:
        if alias.server == "QUORUM":
            quorum: Callable[..., InterlockT] = cast("Any", kind).quorum
            return quorum(alias.target, prefix=alias.prefix, **alias.options)
        target = caches[alias.target] if alias.server == "CACHE" else alias.target
        return kind(target, prefix=alias.prefix, **alias.options)
    except (InvalidCacheBackendError, ImproperlyConfigured) as error:
        raise ConfigError(f"{alias.place}: the cache {alias.target!r} can't be used: {error}") from error
    except ConfigError as error:
        cache = f" (CACHE: {alias.target!r})" if alias.server == "CACHE" else ""
        raise ConfigError(f"{alias.place}{cache}: {error}") from error.__cause__


def _setting() -> dict[str, object]:
    setting = getattr(settings, "INTERLOCK", None)
    if setting is None:
        return {DEFAULT: {}}
    if not isinstance(setting, dict) or not all(
        isinstance(name, str) for name in cast("dict[object, object]", setting)
    ):
        raise ConfigError(
            f"INTERLOCK must be a dict of aliases, each key a str. It is a {type(setting).__name__}. Write {EXAMPLE}"
        )
    return cast("dict[str, object]", setting)


def _check_known(place: str, given: Iterable[object], known: tuple[str, ...]) -> None:
    folded = {each.lower(): each for each in known}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key).lower(), folded, 1)
            meant = f" Did you mean {folded[near[0]]!r}?" if near else ""
            raise ConfigError(f"{place} has no key {key!r}. It may have {', '.join(known)}.{meant}")
