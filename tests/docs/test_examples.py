"""Every Python example in README and docs runs, pasted alone into a new Python; every command in them exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest

from harness.demos import INTERLOCK
from harness.topology import Cluster, Independents, Sentinels

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


# What the examples name, and what stands there instead.
STANDINS = {
    r'"redis\+sentinel://10[^"]*"': lambda: Sentinels(replicas=2),
    r'"redis\+cluster://10[^"]*"': Cluster,
    r'\["redis://10[^\]]*\]': lambda: Independents(number=3),
}


run = partial(subprocess.run, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_each_example_runs_alone_in_a_new_python(page, server, clean, tmp_path):
    """In an empty directory, with no names but its own; all examples of a page on one server, one after the other."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "INTERLOCK_URL"}}
    directory = ROOT if page.name == "simulator.md" else tmp_path  # as that page says
    for number, code in enumerate(blocks(page, "python"), 1):
        pasted = code.replace('"redis://localhost:6379/0"', repr(server.url))
        with ExitStack() as stack:
            for wanted, topology in STANDINS.items():
                if re.search(wanted, pasted):
                    there = stack.enter_context(topology())
                    pasted = re.sub(wanted, repr(getattr(there, "urls", None) or there.url), pasted)
            ended = run([sys.executable, "-"], input=pasted, cwd=directory, env=environment)
        where = f"{page.name}, example {number}:\n{code}\n{ended.stderr}"
        assert ended.returncode == 0, where
        assert "Traceback" not in ended.stderr, where
        assert not [*clean.scan_iter("lock:*", _type="string")], f"a lock is still held after {where}"
    clean.delete("", *NAMES["data"])


def constants_of_calls(code):
    """Of each call of a method: its name, and its first two arguments if they are texts, else None."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            first, second = [*(getattr(each, "value", None) for each in node.args), None, None][:2]
            yield node.func.attr, first, second


def names_in_examples():
    """Which names the examples of all pages use, by kind: a kind of synchronizer, or "data"."""
    kinds = {
        "lock": "lock", "rlock": "lock", "synchronized": "lock",  # of one name these are the same lock
        "get_lock": "lock", "redis_lock": "lock", "set": "data", "get": "data",
        **{kind: kind for kind in ("rwlock", "semaphore", "latch", "barrier", "election")},
    }  # fmt: skip
    names = {kind: set() for kind in kinds.values()}
    for code in (code for page in PAGES for code in blocks(page, "python")):
        for method, first, second in constants_of_calls(code):
            kind, name = ("data", second) if method == "execute" else (kinds.get(method), first)
            if kind and isinstance(name, str):
                names[kind].add(name)
        names["data"] |= {*re.findall(r'\("[A-Z]+", "([^"]+)"', code)}  # commands in a list, or of execute
    return names


NAMES = names_in_examples()


def test_no_two_examples_use_one_name_for_two_things():
    """A reader may run all of them on one server; with `prefix=""` the key of a lock is its name."""
    assert NAMES["data"] >= {"left:42", "left:{42}", "sold:{42}"}
    assert {"stock:42", "nightly"} <= NAMES["lock"]
    for (one, names), (other, others) in combinations(NAMES.items(), 2):
        assert not names & others, f"as {one} and as {other}"


HELP = {  # how to ask a command for its options
    "scripts/simulate": [sys.executable, "-m", "simulator"],
    "scripts/histories": [sys.executable, "-m", "model.histories"],
    "interlock demo": [*INTERLOCK, "demo"],
    "interlock server": [*INTERLOCK, "server"],
    "interlock server start": [*INTERLOCK, "server", "start"],
    "interlock server status": [*INTERLOCK, "server", "status"],
    "interlock server stop": [*INTERLOCK, "server", "stop"],
}


SOURCES = {
    "scripts/test": "tests/conftest.py",
    "scripts/bench": "bench/run.py",
}  # these need more to run, or are pytest's


def options_in_pages():
    """Each command that the pages name, with the long options that stand behind it on its line."""
    named = {}
    for page in PROSE:
        for line in page.read_text().splitlines():
            for found in re.finditer(r"(scripts/\w+|\binterlock (?:demo|server(?: \w+)?)\b)([^`#]*)", line):
                named.setdefault(found[1], set()).update(re.findall(r"--[a-z-]+", found[2]))
    return named


def test_every_command_in_the_pages_exists():
    named = options_in_pages()
    assert named["scripts/histories"] >= {"--topology", "--seed", "--report"}
    assert {"interlock demo", "interlock server stop"} <= {*named}
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    for command, options in named.items():
        if command.startswith("scripts/"):
            script = ROOT / command
            assert os.access(script, os.X_OK), command
            said = script.read_text()
        if command in HELP:
            asked = [*HELP[command], "--help"]
            said = subprocess.check_output(asked, cwd=ROOT, env=environment, text=True, timeout=60)
        if command in SOURCES:
            said = (ROOT / SOURCES[command]).read_text()
        assert not [option for option in options if option not in said], command


def test_every_row_of_the_benchmarks_is_explained():
    rows = re.search(r"^ROWS.*?^}", (ROOT / "bench" / "run.py").read_text(), re.MULTILINE | re.DOTALL)
    table = re.findall(r"^\| (\d+(?:, \d+)*) \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    assert ", ".join(table).split(", ") == re.findall(r"^    (\d+):", rows[0], re.MULTILINE)


def test_every_test_file_in_the_pages_exists():
    for page in PROSE:
        for folder, name in re.findall(r"`(?:tests/)?((?:\w+/)*)(test_\w+\.py)`", page.read_text()):
            assert [*(ROOT / "tests").glob(f"{folder or '**/'}{name}")], f"{page.name}: {folder}{name}"


def anchors(path):
    """What links to headings of this page may name, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_local_link_leads_somewhere():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text()):
            page = path.parent / target if target else path
            assert page.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in anchors(page), f"{path.name}: {target}#{anchor}"
