"""Every Python example in README and docs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = [
    (path.name, number, code)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL), 1)
]


@pytest.mark.parametrize(("page", "number", "code"), EXAMPLES, ids=[f"{page}-{n}" for page, n, _ in EXAMPLES])
def test_example(page, number, code, server, clean, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some make files
    code = code.replace('"redis://localhost:6379/0"', repr(server.url))
    names = {"url": server.url, "__name__": "example"}
    exec(compile(code, f"{page} {number}", "exec"), names)
    if "locks" in names and page == "README.md":
        names["locks"].close()
    for key in clean.scan_iter("stock:*"):
        clean.delete(key)


def test_every_local_link_leads_somewhere():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
