"""Every Python example in README and docs runs, pasted alone into a new Python; every command in them exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pytest

from harness.topology import Cluster, Independents, Sentinels
from interlock.cli import main
from interlock.embedded import stop_shared

ROOT = Path(__file__).parents[2]
APART = {"adr", "internals"}  # whose pages have no examples to paste
PAGES = [
    *ROOT.glob("README*.md"),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name not in APART),
]
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def uses(path, wanted):
    return any(re.search(wanted, code) for code in blocks(path, "python"))


# What the examples name, and what stands there instead.
STANDINS = {
    r'"redis\+sentinel://10[^"]*"': lambda: Sentinels(replicas=2),
    r'"redis\+cluster://10[^"]*"': Cluster,
    r'\["redis://10[^\]]*\]': lambda: Independents(number=3),
}


# Runs each file in a process of its own, and ends at the first that fails. Each has only its own names, as in a new
# Python, for which the imports alone would take longer than the example.
PASTE = """
import gc, os, runpy, signal, sys
import interlock, interlock.aio, redis
gc.freeze()  # else each process spends a tenth of a second at its end on collecting what these made
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        signal.alarm(60)
        runpy.run_path(path, run_name="__main__")
        break
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{path} ended with status {status}")
"""


@pytest.fixture
def own_embedded(monkeypatch):
    """`embedded://` is a server of this test's own, which ends with it."""
    with tempfile.TemporaryDirectory(prefix="il-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield
        stop_shared(force=True)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_each_example_runs_alone_in_a_new_python(page, server, clean, own_embedded, tmp_path):
    """In an empty directory, with no names but its own; all examples of a page on one server, one after the other."""
    if page.parent.name == "frameworks" and find_spec(page.stem) is None:
        pytest.skip(f"{page.stem} is not installed: `scripts/test frameworks` installs it")
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "INTERLOCK_URL"}}
    directory = tmp_path / "empty"
    directory.mkdir()
    files = []
    with ExitStack() as stack:
        there = {wanted: stack.enter_context(make()) for wanted, make in STANDINS.items() if uses(page, wanted)}
        for number, code in enumerate(blocks(page, "python"), 1):
            pasted = code.replace('"redis://localhost:6379/0"', repr(server.url))
            for wanted, topology in there.items():
                pasted = re.sub(wanted, repr(getattr(topology, "urls", None) or topology.url), pasted)
            files.append(tmp_path / f"example_{number}.py")
            files[-1].write_text(pasted)
        ended = subprocess.run(
            [sys.executable, "-c", PASTE, *files], cwd=ROOT if page.name == "simulator.md" else directory,
            env=environment, capture_output=True, text=True, timeout=120, check=False, input="\n" * 100_000,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    held = [*clean.scan_iter("lock:*", _type="string")]
    clean.delete("", *NAMES["data"])
    assert not held


def test_the_first_example_of_the_readme_needs_no_server_and_runs_again_and_again(own_embedded, tmp_path):
    first = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line]) <= 5
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "INTERLOCK_URL"}}
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", first], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=20,
            check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "fence" in ended.stdout


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1000
    assert text.index("embedded://") < text.index("redis://")


def linked_from(page):
    return {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)", page.read_text())}


def test_the_index_has_every_page_and_the_decisions_have_an_index_of_their_own():
    index, decisions = ROOT / "docs" / "index.md", ROOT / "docs" / "adr" / "README.md"
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent != decisions.parent}
    assert {*pages, decisions} - linked_from(index) == {index}
    assert {*decisions.parent.glob("*.md")} - linked_from(decisions) == {decisions}


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


SOURCES = {  # where the options of a script stand
    "scripts/test": "tests/conftest.py",
    "scripts/bench": "bench/run.py",
    "scripts/simulate": "simulator/cli.py",
    "scripts/histories": "tests/model/histories/cli.py",
    "scripts/plants": "tests/plants/__main__.py",
    "scripts/soak": "tests/soak/__main__.py",
}


def options_in_pages():
    """Each command that the pages name, with the long options that stand behind it on its line."""
    named = {}
    for page in PROSE:
        for line in page.read_text().splitlines():
            for found in re.finditer(
                r"(scripts/\w+|\binterlock "
                r"(?:audit|completion|demo|doctor|ls|quorum(?: \w+)?|revoke|run|server(?: \w+)?|show|top|wait)\b)"
                r"([^`#]*)",
                line,
            ):
                ours, _, _ = found[2].partition(" -- ")  # behind it stands a command of its own
                named.setdefault(found[1], set()).update(re.findall(r"--[a-z-]+", ours))
    return named


def test_every_command_in_the_pages_exists(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    named = options_in_pages()
    assert named["scripts/histories"] >= {"--topology", "--seed", "--report"}
    assert {"interlock demo", "interlock run", "interlock server stop"} <= {*named}
    for command, options in named.items():
        if command.startswith("scripts/"):
            assert os.access(ROOT / command, os.X_OK), command
            said = "".join((ROOT / each).read_text() for each in {command, SOURCES.get(command, command)})
        else:
            monkeypatch.setattr(sys, "argv", [*command.split(), "--help"])
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code, command
            said = capsys.readouterr().out
        assert not [option for option in options if option not in said], command


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


def test_no_page_has_the_mark_of_a_conflict():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        assert not re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE), path.name
