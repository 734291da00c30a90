"""System checks: what is wrong, or looks wrong, in INTERLOCK. `manage.py check --deploy` also asks the servers."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.conf import settings
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
    for alias, each in made.values():
        found += _shared_with_a_cache(alias, each)
    return [*found, *_two_prefixes(list(made.values()))]


def _shared_with_a_cache(alias: Alias, made: Interlock) -> list[CheckMessage]:
    """A cache in the same database: its clear() deletes the locks, too."""
    for name, entry in settings.CACHES.items():
        others = [each for each in settings.CACHES if each != name and settings.CACHES[each] == entry]
        if alias.server == "CACHE" and (name == alias.target or alias.target in others):
            continue
        try:
            from django.core.cache import caches  # noqa: PLC0415

            where: Any = address_of(caches[name], for_asyncio=False)
        except Exception:  # noqa: BLE001, S112 (no cache on Redis: nothing to compare)
            continue
        if where.display_url == made._address.display_url:
            return [_flushed(alias, name, where.display_url)]
    if alias.server == "CACHE" and alias.target == "default":
        return [_flushed(alias, "default", made._address.display_url)]
    return []


def _flushed(alias: Alias, cache: str, url: str) -> CheckMessage:
    return Warning(
        f"{alias.place} and the cache {cache!r} share the database {url}: caches[{cache!r}].clear() deletes the locks, "
        "and a server that evicts cached values evicts locks",
        hint="Give the locks a server of their own, with maxmemory-policy noeviction; at least another database.",
        id="interlock.W001",
    )


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
