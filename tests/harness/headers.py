"""Reads the header of a .lua file, and checks messages against it."""

from __future__ import annotations

import re


class Header:
    """KEYS by name, and for each verb its arguments: `fixed` ones, then groups of `group` words any number of times.

    A last key or a last argument in brackets may be left out.
    """

    def __init__(self, text: str) -> None:
        header = text.split("\nlocal ", 1)[0]
        self.keys = [
            name
            for _, name in re.findall(
                r"^--\s+(?:KEYS\s+)?(\d) ([\w-]+|\[\w+\])\s+(?:string|zset|hash|list|stream)\b", header, re.MULTILINE
            )
        ]
        renewed = re.search(r"for `renew`: ([a-z, ]+), \.\.\.", header)
        self.renewed = len(set(renewed[1].split(", "))) if renewed else 0
        self.verbs: dict[str, tuple[int, int]] = {}
        self.longer: set[str] = set()  # verbs that may have one argument more
        for line in re.findall(r"^--   (\w+  .+)$", header, re.MULTILINE):
            verb, *words = re.split(r"\s{2,}", line.split("RETURN")[0].strip())
            if not words:
                self.verbs[verb] = (0, 0)
                continue
            if words[-1].startswith("["):
                words.pop()
                self.longer.add(verb)
            repeated = words[-1].endswith("...")
            start = next((i for i, word in enumerate(words) if word.startswith("(")), len(words) - 1)
            self.verbs[verb] = (start, len(words) - start) if repeated else (len(words), 0)

    def check(self, keys, args) -> None:
        """Fails unless this is a message that the header describes."""
        verb, *rest = args
        if keys and str(keys[-1]).endswith("{voter}"):  # in a quorum: see message.lua
            keys = keys[:-1]
            if verb == "voter":
                return
        assert verb in self.verbs, f"{verb!r} is not in the header"
        fixed, group = self.verbs[verb]
        more = len(rest) - fixed
        assert more == 0 or (more == 1 and verb in self.longer) or (group and more > 0 and more % group == 0), (
            f"{verb}: {rest} against {self.verbs[verb]}"
        )
        if verb == "renew":
            assert len(keys) == self.renewed * more // group
        elif verb == "execute":
            assert len(keys) >= len(self.keys)
        elif self.keys:  # else they are those of other scripts
            assert len(keys) in {len(self.keys), len(self.keys) - self.keys[-1].startswith("[")}
