"""Writes the API for threads of the API for asyncio: see scripts/generate and ADR 37.

The text of `aio.py` stays as it is, comments, docstrings and order of lines included, but for these rules:

(a) `async` goes, and `await x` becomes `run(x)`.
(b) `Awaitable[X]` and `Coroutine[..., X]` become `X`, and the names in `NAMES` and the modules in `MODULES` others.
(c) A method that waits gets the decorator `advising`: a call with wrong words raises an error that says the way out.
    In asyncio it has none, since a decorated `async def` would be no coroutine function for `inspect`.
(d) What a comment `# for asyncio only` marks goes.

Then ruff removes the imports that are not used any more, sorts the others, and formats.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE: Final = Path("src/interlock/aio.py")
TARGET: Final = Path("src/interlock/threads.py")
HEAD: Final = f"""\
# Generated of {SOURCE.name} by scripts/generate: edit that file, and run that script.
\"\"\"The API for threads. `interlock.aio` has the same names for asyncio.

Each public method stands here with its signature and its docstring, and runs the coroutine of a core in
`interlock._api` that does the work: `acquire` runs `_acquire`.
\"\"\"
"""
MODULES: Final = {"_api.asyncio": "_api.threads", "_api.scopes": "_api.threads"}
NAMES: Final = {
    "asyncio": "threading",
    "AsyncIterator": "Iterator",
    "InterlockForAsyncio": "InterlockForThreads",
    "LeaseForAsyncio": "LeaseForThreads",
    "MultiLeaseForAsyncio": "MultiLeaseForThreads",
}
UNWRAPPED: Final = {"Awaitable", "Coroutine"}
IMPORTS: Final = "from ._protocol.run_to_end import run\n"  # what aio.py does not need
UNADVISED: Final = {"release", "observe"}  # nothing that they take could be wrong; one is hot, one a generator
ONLY_ASYNCIO: Final = "# for asyncio only"


class Edit(NamedTuple):
    """The text between two offsets becomes another one."""

    start: int
    end: int
    text: str


class Source:
    """A text, its tree, and where its lines begin. Before code stands ASCII only, so a column is one character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Where this place of a line is in the text."""
        return self._lines[line - 1] + column

    def start(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Where this node begins."""
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Where this node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def line(self, number: int) -> str:
        """One line, by its number."""
        return self.text[self.offset(number, 0) : self.offset(number + 1, 0)]


def for_threads(text: str) -> str:
    """The API for threads, of the text of that for asyncio: not formatted yet."""
    source = Source(text)
    docstring, *_ = source.tree.body
    imports = max(source.end(node) for node in source.tree.body if isinstance(node, ast.ImportFrom)) + 1
    edits = [Edit(0, source.end(docstring) + 1, HEAD), Edit(imports, imports, IMPORTS)]
    for node in _kept(source, source.tree):
        edits += _of_node(source, node)
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _kept(source: Source, node: ast.AST) -> Iterator[ast.AST]:
    """This node and those in it, but for what is in one that goes."""
    yield node
    if not _goes(source, node):
        for child in ast.iter_child_nodes(node):
            yield from _kept(source, child)


def _goes(source: Source, node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and bool(node.decorator_list)
        and ONLY_ASYNCIO in source.line(node.decorator_list[0].lineno)
    )


def _of_node(source: Source, node: ast.AST) -> list[Edit]:  # noqa: PLR0911 (one line a kind of node)
    start = source.start(node) if isinstance(node, ast.expr | ast.stmt | ast.alias) else 0
    match node:
        case ast.FunctionDef() if _goes(source, node):
            return [Edit(source.offset(node.decorator_list[0].lineno, 0), source.end(node) + 1, "")]
        case ast.AsyncFunctionDef():
            decorator = "" if node.name in UNADVISED else f"@advising\n{' ' * node.col_offset}"
            return [Edit(start, start + len("async "), decorator)]
        case ast.Await():
            return [Edit(start, source.start(node.value), "run("), Edit(source.end(node), source.end(node), ")")]
        case ast.Subscript(value=ast.Name(id=name)) if name in UNWRAPPED:
            last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
            return [Edit(start, source.start(last), ""), Edit(source.end(last), source.end(node), "")]
        case ast.Name(id=name) | ast.alias(name=name) if name in NAMES:
            return [Edit(start, start + len(name), NAMES[name])]
        case ast.ImportFrom(module=str(module)) if module in MODULES:
            at = start + len("from ") + node.level
            return [Edit(at, at + len(module), MODULES[module])]
        case _:
            return []


def _ruff(text: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(  # noqa: S603 (ruff itself)
        command, input=text, capture_output=True, text=True, check=True
    ).stdout


def generated() -> str:
    """The text of `threads.py` as it should be."""
    made = for_threads(SOURCE.read_text())
    return _ruff(_ruff(made, "check", "--fix-only", "--select", "I,F401"), "format")


def main() -> int:
    """Writes the file, or compares it."""
    parser = argparse.ArgumentParser(description=f"Writes {TARGET} of {SOURCE}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file would change")
    wanted = generated()
    if not parser.parse_args().check:
        TARGET.write_text(wanted)
        return 0
    found = TARGET.read_text()
    for line in difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(TARGET), "generated", lineterm=""):
        print(line)  # noqa: T201
    if found != wanted:
        print(f"{TARGET} is not what scripts/generate writes: edit {SOURCE}, and run scripts/generate")  # noqa: T201
    return int(found != wanted)


if __name__ == "__main__":
    raise SystemExit(main())
