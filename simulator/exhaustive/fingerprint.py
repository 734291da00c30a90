"""The fingerprint of a process: equal for two processes only if they do the same from here on.

Theory. The walk begins at a few objects, and follows every reference: fields, containers, the local variables of
coroutines and where each of them waits. An object that it meets again is a number, so that the same objects in other
relations have another fingerprint. It passes over what never changes (a script, a resource, a class, the fields in
`PASSED_OVER`). A field that a later version adds is in the fingerprint by itself. So two states with one fingerprint
differ at most in what no variable shows: the place of a loop within its list.
"""

from __future__ import annotations

import hashlib
import types
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from interlock._client.grant import AcquireOptions
from interlock._protocol.resource import Resource, Script

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ATOMS: Final = {int, float, str, bytes, bool, type(None)}
CONSTANT: Final = {Resource, Script}
# Fields that the walk passes over: no decision of the protocol reads them, or they never change.
PASSED_OVER: Final = {
    "AcquireOptions": {*AcquireOptions.__slots__},
    "Book": {"server", "runtime", "worker"},
    "Attempt": {"place", "caller", "observation", "waits_since", "look_at", "resource", "busy", "make_lease"},
    "Core": {"say_more", "all_waits", "caller", "server", "runtime", "process_id", "try_for", "frames_to_user"},
    "Grant": {"since"},
    "Lease": {"_made_by"},
    "Pool": {"tasks", "address", "push_handler", "sent", "silence", "listens"},
    "Proofs": {"runtime", "find_least_ttl"},
    "LeaseEnds": {"runtime", "reports", "points", "wake_renewer_at", "on_tick"},
    "UnreadReleases": {"server", "runtime", "wake_at"},
    "Renewer": {"server", "runtime", "points", "send_renewals"},
    "Requests": {"server", "runtime", "answered", "outages", "given_retry_for"},
    "ServerHistory": {"display_url", "quarantine_seconds"},
    "Undo": {"server", "runtime", "wake_at"},
    "Waiters": {"pushes", "server", "runtime", "wake_at", "wake_ends_at", "on_tick"},
    "Cohorts": {"runtime", "book", "wake_at", "pass_on"},
    "Worker": {"runtime", "name", "requests", "start_others", "task", "called_for"},
    "_OneServer": {"address", "display_url", "retry_for", "can_fail_over", "runtime", "primacy"},
}  # fmt: skip
_fields: dict[type, tuple[str, ...]] = {}


class Walk:
    """One walk over objects, which makes a list of words."""

    def __init__(self, names: Mapping[type, Callable[[Any], str]]) -> None:
        """`names`: for some classes, what stands in place of an object."""
        self.words = list[Any]()
        self._names = names
        self._seen = dict[int, int]()

    def visit(self, value: Any) -> None:
        """Add the words of this object."""
        kind = value.__class__
        words = self.words
        if kind in ATOMS:
            words.append(value)
            return
        if kind in CONSTANT:
            words.append(value.name)
            return
        if kind in self._names:
            self.visit(self._names[kind](value))
            return
        if kind is tuple:
            words.append("(")
            for each in value:
                self.visit(each)
            words.append(")")
            return
        if kind is types.MethodType:  # made anew by each look at it
            words.append(value.__name__)
            self.visit(value.__self__)
            return
        number = self._seen.get(id(value))
        if number is not None:
            words.append(("again", number))
            return
        self._seen[id(value)] = len(self._seen)
        words.append(kind.__name__)
        self._visit_inside(value, kind)

    def _visit_inside(self, value: Any, kind: type) -> None:
        for kinds, visit in self._INSIDE:
            if isinstance(value, kinds):
                visit(self, value)
                return
        self._visit_object(value, kind)

    def _visit_dict(self, value: Any) -> None:
        for key, each in value.items():
            self.visit(key)
            self.visit(each)
        self.words.append("}")

    def _visit_items(self, value: Any) -> None:
        for each in value:
            self.visit(each)
        self.words.append("]")

    def _visit_set(self, value: Any) -> None:
        self.words.append(sorted(map(repr, value)))

    def _visit_function(self, value: Any) -> None:
        self.words.append(value.__qualname__)
        for cell in value.__closure__ or ():
            self.visit(cell.cell_contents)

    def _visit_name(self, value: Any) -> None:
        self.words.append(getattr(value, "__qualname__", None) or getattr(value, "co_qualname", None) or value.__name__)

    def _visit_weak_reference(self, value: Any) -> None:
        self.visit(value())

    def _visit_partial(self, value: Any) -> None:
        self.visit(value.func)
        self.visit(value.args)

    def _visit_error(self, value: Any) -> None:
        self.words.append(str(value))
        for name, each in value.__dict__.items():
            self.words.append(name)
            self.visit(each)
        self.visit(value.__cause__)

    def _visit_object(self, value: Any, kind: type) -> None:
        fields = _fields.get(kind)
        if fields is None:
            slots = {name for each in kind.__mro__ for name in _slots_of(each)}
            fields = _fields[kind] = tuple(
                sorted(slots - {"__weakref__", "__dict__"} - PASSED_OVER.get(kind.__name__, set()))
            )
        for name in fields:
            self.visit(getattr(value, name, None))
        if (attributes := getattr(value, "__dict__", None)) is not None:
            skipped = PASSED_OVER.get(kind.__name__, ())
            for name in sorted(attributes):
                if name not in skipped:
                    self.words.append(name)
                    self.visit(attributes[name])

    def _visit_coroutine(self, coroutine: Any) -> None:
        """Add where a coroutine waits, its variables, and the same of the coroutine that it awaits."""
        words = self.words
        while type(coroutine) is types.CoroutineType:
            frame = coroutine.cr_frame
            words.append(coroutine.__qualname__)
            if frame is None:
                return
            words.append(frame.f_lasti)
            for name, each in frame.f_locals.items():
                words.append(name)
                self.visit(each)
            coroutine = coroutine.cr_await

    _INSIDE: ClassVar[Any] = (
        (dict, _visit_dict),
        ((list, deque, tuple), _visit_items),
        ((set, frozenset), _visit_set),
        (types.CoroutineType, _visit_coroutine),
        (types.FunctionType, _visit_function),
        ((types.BuiltinFunctionType, types.CodeType, types.ModuleType, type), _visit_name),
        (weakref.ref, _visit_weak_reference),
        (partial, _visit_partial),
        (BaseException, _visit_error),
    )


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def fingerprint(names: Mapping[type, Callable[[Any], str]], *roots: object) -> bytes:
    """Return a hash of all that these objects know. `names`: for some classes, what stands in place of an object."""
    walk = Walk(names)
    for each in roots:
        walk.visit(each)
    return hashlib.blake2b(repr(walk.words).encode(), digest_size=16).digest()
