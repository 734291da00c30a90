"""Every Python example in README and docs runs."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.topology import Cluster, Independents, Sentinels

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    (path.name, number, code)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL), 1)
]

# What the examples name, and what stands there instead.
STANDINS = {
    r'"redis\+sentinel://10[^"]*"': lambda: Sentinels(replicas=2),
    r'"redis\+cluster://10[^"]*"': Cluster,
    r'\["redis://10[^\]]*\]': lambda: Independents(number=3),
}


@pytest.mark.parametrize(("page", "number", "code"), EXAMPLES, ids=[f"{page}-{n}" for page, n, _ in EXAMPLES])
def test_example(page, number, code, server, clean, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some make files
    code = code.replace('"redis://localhost:6379/0"', repr(server.url))
    names = {"url": server.url, "__name__": "example"}
    with ExitStack() as stack:
        for wanted, topology in STANDINS.items():
            if re.search(wanted, code):
                there = stack.enter_context(topology())
                code = re.sub(wanted, repr(getattr(there, "urls", None) or there.url), code)
        exec(compile(code, f"{page} {number}", "exec"), names)
        _close(names, page)
    for key in clean.scan_iter("stock:*"):
        clean.delete(key)


def _close(names, page) -> None:
    if "locks" in names and page in {"README.md", "failover.md", "cluster.md", "quorum.md"}:
        names["locks"].close()


def test_every_local_link_leads_somewhere():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
