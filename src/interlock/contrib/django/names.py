"""The name under which a model instance is locked: `app.model:pk`, the same in every process and for every proxy."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

from typing import Any, Final, cast

from django.db.models import Model

from interlock.contrib._names import CallNames
from interlock.errors import ConfigError

__all__ = ["name_of"]


def _named(label: str, pk: object) -> None:
    """The arguments of which the name of an instance is made."""


_NAMES: Final = CallNames("the name of a model instance", "{label}:{pk}", _named)


def name_of(thing: str | Model) -> str:
    """Return the name of the lock of this model instance, such as "shop.order:7"; a str is a name already.

    A proxy model has the name of its concrete model. The name says nothing of the database: the same row in two
    databases has one name. Raises ConfigError for an instance that was not saved, whose key no other process knows.
    """
    if isinstance(thing, str):
        return thing
    if not isinstance(thing, Model):  # pyright: ignore[reportUnnecessaryIsInstance]  # not all users have one
        kind: Any = thing
        advice = ""
        if isinstance(kind, type) and issubclass(kind, Model):
            label: str = cast("Any", kind)._meta.label_lower
            advice = f". Give one {kind.__name__}, or name what all of them are, as in {label!r}"
        raise ConfigError(f"a lock is named by a str or a saved model instance, not by {thing!r}{advice}")
    options = _concrete(thing)._meta
    made_up = thing._state.adding and options.pk is not None and options.pk.has_default()
    if thing.pk is None or made_up:
        why = "its key was made up here, and no other process knows it" if made_up else "it has no key"
        raise ConfigError(
            f"{options.label_lower}: this instance was not saved, so {why}, and its lock would keep nobody out. Save "
            f"it first, or lock a name, as in '{options.label_lower}:new'"
        )
    pk = ",".join(map(str, thing.pk)) if isinstance(thing.pk, tuple) else thing.pk
    return _NAMES.of((options.label_lower, pk), {})


def _concrete(thing: Model) -> Any:
    return cast("Any", thing)._meta.concrete_model
