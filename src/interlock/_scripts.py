"""The .lua files: loaded once, known to servers by their SHA1."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

from ._core import Script

INCLUDE: Final = "--include queue\n"  # what several scripts share stands in a file of its own


@cache
def load(name: str, package: str = "interlock.primitives") -> Script:
    """The script `<name>.lua` of a package."""
    source = _text(package, name)
    if INCLUDE in source:
        source = source.replace(INCLUDE, _text(package, "queue"))
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())  # noqa: S324 (Redis names them so)


def _text(package: str, name: str) -> str:
    return files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")
