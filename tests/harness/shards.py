"""A long run of the suite in pieces: `--shard 3/40` runs a fortieth of the tests, and notes what came of it.

The functions are dealt out by their names, so that a test stays in its piece while other tests come and go, and a
function's combinations stay together. `.shards.json` keeps the result of each piece, with the commit it ran on.
"""

from __future__ import annotations

import json
import subprocess
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
NOTES = ROOT / ".shards.json"


class Shard(NamedTuple):
    """The piece `number` of `of`, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse "3/40". Raises UsageError."""
        number, slash, of = text.partition("/")
        if slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of):
            return cls(int(number), int(of))
        raise pytest.UsageError(f"--shard wants a piece and the number of pieces, as in 3/40, not {text!r}")

    def has(self, nodeid: str) -> bool:
        """Whether this test is in this piece."""
        return zlib.crc32(nodeid.partition("[")[0].encode()) % self.of == self.number - 1


def commit(root: Path = ROOT) -> str:
    """The commit of the sources; with a "+" if they have changed since, "" outside of a checkout."""
    said = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False
    )
    return said.stdout.strip()


def note(shard: Shard, suite: str, result: dict[str, Any], notes: Path = NOTES) -> list[str]:
    """Keep the result of this piece, and return a table of all pieces of this suite."""
    kept = json.loads(notes.read_text()) if notes.exists() else {}
    pieces = kept.setdefault(f"{suite}/{shard.of}", {})
    pieces[str(shard.number)] = result
    notes.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    lines = [f"{'piece':>6} {'commit':12} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}"]
    for number in sorted(map(int, pieces)):
        each = pieces[str(number)]
        lines.append(
            f"{number:>6} {each['commit']:12} {each['passed']:>7} {each['failed']:>7} {each['skipped']:>7} "
            f"{each['seconds']:>8}"
        )
    missing = [number for number in range(1, shard.of + 1) if str(number) not in pieces]
    lines.append(f"missing: {', '.join(map(str, missing)) or 'none'}")
    return lines
