"""The attributes of each log record about a lock, so that a formatter (JSON, say) need not parse its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock._protocol.resource import Resource


def lock_fields(resource: Resource, fence: int | None = None, token: str | None = None) -> dict[str, object]:
    """The attributes of a record about this resource, for `extra=`: always all four; None for what nobody knows.

    `fence` and `token`: of the lease, or of the attempt to get one.
    """
    return {"lock": resource.name, "kind": resource.kind, "fence": fence, "token": token}
