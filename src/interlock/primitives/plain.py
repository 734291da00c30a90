"""What users get as an answer, as plain values: what `json.dumps()` takes."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Any, ClassVar, cast


class Answer:
    """A dataclass that users get as an answer."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def as_dict(self) -> dict[str, object]:
        """Return its fields by name, for JSON: times as texts in ISO 8601, tuples as lists, answers as dicts."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    __json__ = as_dict
    """Celery asks for this when it serializes what a task returns."""


def plain(value: object) -> object:
    """The value as JSON knows it; a value that the user's own function has returned stays as it is."""
    if isinstance(value, Answer):
        return value.as_dict()
    if isinstance(value, datetime):
        return value.isoformat()
    return [*map(plain, cast("tuple[object, ...]", value))] if isinstance(value, tuple) else value
