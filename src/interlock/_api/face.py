"""What all public classes share: they say the way out for a missing attribute, and stay in their process."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, Self

from .misuse_errors import no_attribute

if TYPE_CHECKING:
    from collections.abc import Mapping


class Face:
    """The base of what users see."""

    __slots__ = ()
    _instead_of_pickling = "make it in each process"
    _hints: Mapping[str, str] = MappingProxyType({})
    """The way out for a missing attribute, by its name."""

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with the way out if there is one."""
            no_attribute(self, name, self._hints)

    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        """Refuse to be pickled: this has connections, threads or a lease of this process."""
        raise TypeError(f"{self!r} can't be pickled, since it belongs to this process: {self._instead_of_pickling}")

    def __copy__(self) -> Self:
        """Return itself: a second one would be the same."""
        return self

    def __deepcopy__(self, memo: object, /) -> Self:
        """Return itself, as a part of something that is copied."""
        return self
