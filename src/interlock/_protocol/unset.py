"""What stands in place of an argument that was not given, where None means something."""

from __future__ import annotations


class Unset:
    """The type of such an argument."""

    def __init__(self, meaning: str) -> None:
        self.meaning = meaning  # what counts instead, for help()

    def __repr__(self) -> str:
        return self.meaning
