"""A planted bug: changes of the text of interlock, and the copy of interlock that has them.

Rules. (a) A change must fit: its text stands in the file as often as the plant says, or the plant raises. So a plant
never tests the original because the code has moved on. (b) The originals stay as they are: the copy is in a directory
of its own, which stands first on PYTHONPATH, and each net checks that the processes it starts import that copy.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from plants.nets import Net

PROJECT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = PROJECT / "src" / "interlock"


class Change(NamedTuple):
    """One change of a file."""

    file: str
    """Below src/interlock."""
    old: str
    new: str
    times: int = 1
    """How often the old text stands in the file."""

    def applied(self, text: str) -> str:
        """The text with the change. Raises ValueError if the text has moved on."""
        if text.count(self.old) != self.times:
            raise ValueError(
                f"{self.file} has changed: it has {text.count(self.old)} times, not {self.times}, {self.old!r}"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Plant:
    """One planted bug."""

    name: str
    changes: tuple[Change, ...]
    nets: tuple[Net, ...]
    """Each of them must catch it."""

    def texts(self) -> dict[str, str]:
        """The new text of each file that it changes."""
        texts: dict[str, str] = {}
        for change in self.changes:
            texts[change.file] = change.applied(texts.get(change.file) or (SOURCE / change.file).read_text())
        return texts

    def plant(self, directory: Path) -> Path:
        """Make a copy of interlock with this bug below the directory. Returns the start of PYTHONPATH."""
        source = directory / "src"
        shutil.copytree(SOURCE.parent, source, ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in self.texts().items():
            (source / "interlock" / file).write_text(text)
        return source
