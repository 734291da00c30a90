"""The names in docs/internals/architecture.md: each module, function and field that the page names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/interlock"
PAGE = (ROOT / "docs/internals/architecture.md").read_text().partition("**What it takes.**")[0]  # a trial comes behind
PICTURES = [  # of each line what stands behind the states or participants, which have names of their own
    line.partition(":")[2] or line
    for picture in re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    for line in picture.splitlines()
]
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
FILE = re.compile(r"[\w/]+\.(?:py|lua)\b")
NAME = re.compile(r"\b[A-Z]\w*\.\w+|\b_?[a-z]+_[a-z_]+\b|\b[A-Z][a-z]+[A-Z]\w+")  # of a class and its member, or alone


def test_the_files_that_the_page_names_are_there():
    named = {file for text in (*SPANS, *PICTURES) for file in FILE.findall(text)}
    tree = [str(path.relative_to(ROOT)) for path in (*SOURCE.rglob("*"), *(ROOT / "tests").rglob("*.py"))]
    assert len(named) > 60
    assert not [file for file in sorted(named) if not any(f"/{path}".endswith(f"/{file}") for path in tree)]


def test_the_functions_and_fields_that_the_page_names_are_there():
    paths = [path for folder in ("src", "simulator", "tests/harness", "scripts") for path in (ROOT / folder).rglob("*")]
    code = "\n".join(
        path.read_text() for path in paths if path.suffix in {".py", ".lua"} or path.parent.name == "scripts"
    )
    words = set(re.findall(r"\w+", code)) | {word for path in paths for word in path.parts}
    named = {
        word for text in (*SPANS, *PICTURES) for name in NAME.findall(FILE.sub("", text)) for word in name.split(".")
    }
    assert len(named) > 100
    assert not sorted(named - words)
