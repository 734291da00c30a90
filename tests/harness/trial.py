"""The trial of wrong uses: what people do wrong, as data, and what the error has to say to them.

Each entry has a short name, the wrong use, the type of the error, and what its message must contain: the lock or the
option, the cause, the way out. To read all messages as a user would: `pytest --junitxml=FILE` on the two modules of the
trial, whose tests record each message as a property.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.errors import LockError

if TYPE_CHECKING:
    from collections.abc import Callable

BOTH = ("threads", "asyncio")
# What no message may contain: names that only readers of the source know.
INTERNAL = re.compile(r"\w+Core\b|\bCore\.|_api\b|Lockable|@user_script|\bNoneType' object|typing\.|builtins\.")


class WrongUse(NamedTuple):
    """One wrong use."""

    name: str
    use: Callable[..., Any]
    error: type[BaseException]
    says: tuple[str, ...]
    modes: tuple[str, ...] = BOTH

    def check(self, error: BaseException | None) -> str:
        """Fails unless this error says what a user needs to know. Returns how a reader sees it."""
        assert error is not None, "nobody was told"
        text, shown = str(error), f"{type(error).__name__}: {error}"
        assert type(error) is self.error, shown
        missing = [words for words in self.says if words not in text]
        assert not missing, f"{missing} not in: {shown}"
        assert not INTERNAL.search(text), shown
        assert len(re.findall(r"[.:?] [A-Z]", text)) <= 3, f"too long: {shown}"
        if isinstance(error, LockError) and any(re.match(r"(?!synchronized)\w+[( ]'a'", words) for words in self.says):
            assert error.name == "a", f"name={error.name!r}: {shown}"
        return shown


def wrong(
    name: str, use: Callable[..., Any], error: type[BaseException], *says: str, only: str | None = None
) -> WrongUse:
    """An entry; `only` one mode, if the other has no such use, or another message."""
    return WrongUse(name, use, error, says, (only,) if only else BOTH)


def cases(uses: list[WrongUse]) -> list[tuple[WrongUse, str]]:
    """Each use in each of its modes. Fails if a use is there twice."""
    found = [(use, mode) for use in uses for mode in use.modes]
    names = [(use.name, mode) for use, mode in found]
    assert len(names) == len({*names}), [name for name in names if names.count(name) > 1]
    return found


def title(case: tuple[WrongUse, str]) -> str:
    """The id of a test."""
    use, mode = case
    return f"{use.name}-{mode}"
