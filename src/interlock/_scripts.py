"""The .lua files: loaded once, known to servers by their SHA1."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from ._core import Script


@cache
def load(name: str, package: str = "interlock.primitives") -> Script:
    """The script `<name>.lua` of a package."""
    source = files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())  # noqa: S324 (Redis names them so)
