"""Who writes a field of an attempt, a hold, a grant or a cohort: the table in docs/internals/architecture.md.

The severe faults of this library sat where two features wrote one flag. So a module that begins to write a field of
another module's noun fails here, and its author has to say in the table why it must.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import interlock
from interlock._client.cohort import Cohort, Reservation
from interlock._client.grant import Attempt, Grant, Hold
from interlock._client.retries import Question

SOURCE = Path(interlock.__file__).parent
PAGE = SOURCE.parents[1] / "docs/internals/architecture.md"
NOUNS = (Question, Attempt, Hold, Grant, Cohort, Reservation)
PACKAGES = ("_client", "_api", "_people", "_session", "testing")  # no other one has these nouns in its hands
OF_OTHERS = {"error", "late", "queue", "section"}
"""Variables with objects of another kind, which have fields of the same names."""


def written():
    """By field, the modules that assign it."""
    names, fields = {noun.__name__ for noun in NOUNS}, {field for noun in NOUNS for field in noun.__slots__}
    found = defaultdict(set)
    for file in sorted(file for package in PACKAGES for file in (SOURCE / package).rglob("*.py")):
        module = str(file.relative_to(SOURCE).with_suffix(""))
        tree = ast.parse(file.read_text())
        own = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in fields:
                receiver = ast.unparse(node.value).rpartition(".")[2]
                is_own = any(node in ast.walk(noun) for noun in own)
                if receiver not in OF_OTHERS and (receiver != "self" or is_own):
                    found[node.attr].add(module)
    return found


def table():
    """The same, as the page says it."""
    text = PAGE.read_text()
    part = text[text.index("## Who writes what") :]
    part = part[: part.index("\n## ", 5)]
    rows = re.findall(r"^\| ([`\w, ]+) \| ([`\w/, ]+) \| [^|]+ \|$", part, re.MULTILINE)
    said = defaultdict(set)
    for fields, modules in rows:
        for field in re.findall(r"`(\w+)`", fields):
            said[field] |= set(re.findall(r"`([\w/]+)`", modules))
    return said


def test_each_field_is_written_where_the_table_says_and_nowhere_else():
    assert {field: sorted(modules) for field, modules in written().items()} == {
        field: sorted(modules) for field, modules in table().items()
    }
