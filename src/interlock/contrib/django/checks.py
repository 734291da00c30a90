"""System checks: what is wrong, or looks wrong, in INTERLOCK. `manage.py check --deploy` also asks the servers."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.cache import DEFAULT_CACHE_ALIAS, caches
from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004 (as Django names it)

from interlock._connect.target import address_of
from interlock.errors import ConfigError, LockError

from .aliases import locks
from .settings import Alias, alias_of, aliases

if TYPE_CHECKING:
    from .aliases import Interlock

__all__ = ["check_servers", "check_settings"]

TAG = "interlock"


@register(TAG)
def check_settings(**_: Any) -> list[CheckMessage]:
    """Each alias names a server on which locks are safe, and no two aliases of one server miss each other's locks."""
    try:
        names = aliases()
    except ConfigError as error:
        return [Error(str(error), id="interlock.E001")]
    found: list[CheckMessage] = []
    made: dict[str, tuple[Alias, Interlock]] = {}
    for name in names:
        try:
            made[name] = alias_of(name), locks[name]
        except ConfigError as error:
            found.append(Error(str(error), id="interlock.E001"))
    if "default" not in names:
        found.append(Error("INTERLOCK has no alias 'default', which `locks` is", hint="Add it.", id="interlock.E002"))
    every = list(made.values())
    return [*found, *_shared_with_a_cache(every), *_two_prefixes(every)]


def _shared_with_a_cache(made: list[tuple[Alias, Interlock]]) -> list[CheckMessage]:
    """Caches of values in a database of locks: their clear() deletes the locks, too."""
    of_locks = {alias.target for alias, _ in made if alias.server == "CACHE"} - {DEFAULT_CACHE_ALIAS}
    found: list[CheckMessage] = []
    for name in settings.CACHES:
        url = "" if name in of_locks else _url_of_cache(name)
        for alias, each in made:
            if each._address.display_url == url:
                message = (
                    f"{alias.place} and the cache {name!r} share the database {url}: caches[{name!r}].clear() deletes "
                    "the locks, and a server that evicts cached values evicts locks"
                )
                hint = "Give the locks a server with maxmemory-policy noeviction; at least a database of their own."
                found.append(Warning(message, hint=hint, id="interlock.W001"))
    return found


def _url_of_cache(name: str) -> str | None:
    try:
        return address_of(caches[name], for_asyncio=False).display_url
    except Exception:  # noqa: BLE001 (a cache that is not on Redis, or not right: Django says so)
        return None


def _two_prefixes(made: list[tuple[Alias, Interlock]]) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for number, (alias, each) in enumerate(made):
        for other, another in made[:number]:
            if each._address.display_url == another._address.display_url and each.prefix != another.prefix:
                message = (
                    f"{other.place} and {alias.place} are one server with two prefixes, {another.prefix!r} and "
                    f"{each.prefix!r}: a lock of one keeps nobody out of the lock of the same name of the other"
                )
                hint = "Use one alias for what must exclude each other. If that is meant, silence this check."
                found.append(Warning(message, hint=hint, id="interlock.W002"))
    return found


@register(TAG, deploy=True)
def check_servers(**_: Any) -> list[CheckMessage]:
    """Each server answers, and is one that other machines share."""
    found: list[CheckMessage] = []
    try:
        named = [(alias_of(name), locks[name]) for name in aliases()]
    except ConfigError:
        return []  # check_settings says so
    for alias, made in named:
        if made._address.display_url.startswith("embedded:"):
            found.append(
                Warning(
                    f"{alias.place} is embedded://, a server of this user on this machine: its locks keep no other "
                    "machine out",
                    hint="Name a server that all machines share.",
                    id="interlock.W003",
                )
            )
        try:
            made.ping()
        except LockError as error:
            found.append(Warning(f"{alias.place}: {error}", id="interlock.W004"))
    return found
