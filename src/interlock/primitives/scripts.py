"""The .lua files: this module loads each file once, and servers know each script by its SHA1.

A client sends the SHA1 only. After a server's reply NOSCRIPT, `_servers/single.py` sends the text.

Code that several scripts share stands in one file. The line `--include queue` inserts the text of queue.lua. So two
places can use a file of statements without a function, which Lua would make anew in each call. The line
`--function lock` inserts the whole script lock.lua as a local function with its own KEYS and ARGV, so that one script
can run another.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final

from interlock._protocol.resource import Script

PACKAGE: Final = "interlock.primitives"


@cache
def load(name: str, package: str = PACKAGE) -> Script:
    """Load the script `<name>.lua` of a package. The files that it includes stand in interlock.primitives."""
    source = _text(name, package)
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())  # noqa: S324 (Redis names them so)


def _text(name: str, package: str) -> str:
    def insert(line: re.Match[str]) -> str:
        indent, directive, included = line.groups()
        text = _text(included, PACKAGE)
        if directive == "function":
            return f"local function {included}(KEYS, ARGV)\n{text}end\n"
        return indent + text.removesuffix("\n").replace("\n", "\n" + indent) + "\n"

    source = files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return re.sub(r"^( *)--(include|function) (\w+)\n", insert, source, flags=re.MULTILINE)
