"""The layers of the code: a module imports from its own layer and from those below, imports for typing included.

`UPWARD` and `CYCLES` list what does not hold yet. Both may only shrink: the test fails if a new one appears, and also
if a listed one is gone, so that the lists stay true. A failure prints the list as it should be.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "interlock"

# From bottom to top. A name stands for the module, or for all modules of the package that no longer name stands for.
LAYERS = {
    "errors, names, timing": "errors _protocol.names _protocol.timing _protocol.log",
    "forks": "_protocol.mutex _protocol.forks _protocol.run_to_end",
    "protocol types": "_protocol",
    "primitives": "primitives",
    "client": "_client",
    "people": "_people",
    "session": "_session",
    "embedded, connect": "embedded _connect",
    "quarantine": "_quarantine",
    "transports": "_transports",
    "servers": "_servers",
    "api": "_api",
    "aio, threads": "interlock threads aio",
    "doctor": "_doctor",
    "fence, compat, contrib": "fence compat contrib",
    "cli, testing": "cli __main__ testing contrib.django.management",
}

# importer: what it imports from a higher layer
UPWARD: dict[str, str] = {}

# Modules that import each other in a circle.
CYCLES: list[str] = []
CYCLES_OF_SIMULATOR = ["chance coroutines scheduler"]  # for types only: the world, and the actors in it

Graph = dict[str, set[str]]


def modules(source: Path = SOURCE, root: str = "interlock") -> dict[str, Path]:
    """Name -> file, for each module; the package itself is `interlock`, the others go without that prefix."""
    found = {}
    for path in source.rglob("*.py"):
        place = path.relative_to(source).with_suffix("")
        found[".".join(place.parts if place.name != "__init__" else place.parent.parts) or root] = path
    return found


def graph(source: Path = SOURCE, root: str = "interlock") -> Graph:
    """Module -> the modules that it imports, anywhere in its text."""
    known = modules(source, root)
    found: Graph = {}
    for name, path in known.items():
        package = (root, *path.parent.relative_to(source).parts)
        wanted = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
                module = ".".join(filter(None, (start, node.module)))
                # `from package import module` imports that module, `from module import name` this one.
                wanted += [
                    each if local(each := f"{module}.{alias.name}", root) in known else module for alias in node.names
                ]
            elif isinstance(node, ast.Import):
                wanted += [alias.name for alias in node.names]
        found[name] = {local(each, root) for each in wanted if each.split(".")[0] == root} - {name}
    return found


def local(name: str, root: str = "interlock") -> str:
    """`interlock.ports.threads` -> `ports.threads`."""
    return name.removeprefix(f"{root}.")


def cycles(graph: Graph) -> list[set[str]]:
    """The strongly connected components of more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for each in graph[name]:
            if each not in index:
                visit(each)
            if each in stack:
                low[name] = min(low[name], low[each])
        if low[name] == index[name]:
            at = stack.index(name)
            component = set(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def layer(name: str) -> int | None:
    """The number of a module's layer, from the bottom."""
    numbers = {each: number for number, names in enumerate(LAYERS.values()) for each in names.split()}
    while name not in numbers and "." in name:
        name = name.rpartition(".")[0]
    return numbers.get(name)


def upward() -> dict[str, str]:
    """The imports that go up."""
    going = {
        name: " ".join(sorted(each for each in imported if layer(each) > layer(name)))
        for name, imported in sorted(graph().items())
    }
    return {name: imported for name, imported in going.items() if imported}


def test_every_module_has_a_layer_and_every_name_in_the_layers_is_one():
    known = modules()
    assert not [name for name in known if layer(name) is None], "LAYERS does not name these"
    assert not [name for names in LAYERS.values() for name in names.split() if name not in known]


def test_no_module_imports_from_a_higher_layer():
    found = upward()
    assert found == {name: " ".join(sorted(imported.split())) for name, imported in UPWARD.items()}, (
        "UPWARD should be:\n" + "\n".join(f'    "{a}": "{b}",' for a, b in found.items())
    )


def test_no_modules_import_each_other():
    found = sorted(" ".join(sorted(names)) for names in cycles(graph()))
    assert found == sorted(" ".join(sorted(names.split())) for names in CYCLES), "CYCLES should be:\n" + "\n".join(
        f'    "{names}",' for names in found
    )


def test_no_modules_of_the_simulator_import_each_other():
    found = cycles(graph(SOURCE.parents[1] / "simulator", "simulator"))
    assert sorted(" ".join(sorted(names)) for names in found) == CYCLES_OF_SIMULATOR


def test_the_graph_sees_every_kind_of_import(tmp_path):
    for name, text in {
        "__init__": "from .threads import Interlock",
        "threads": "import interlock.errors",
        "errors": "",
        "ports/__init__": "",
        "ports/wire": "if TYPE_CHECKING:\n from ..errors import LockError",
        "ports/single": "def connect():\n from . import wire\n from interlock import ports",
        "cli": "from interlock import Interlock, errors\nimport sys",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert graph(tmp_path) == {
        "interlock": {"threads"},
        "threads": {"errors"},
        "errors": set(),
        "ports": set(),
        "ports.wire": {"errors"},
        "ports.single": {"ports.wire", "ports"},
        "cli": {"interlock", "errors"},
    }


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"d", "a"}}) == [{"a", "b", "c", "d", "e"}]
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]


def client_texts() -> dict[str, ast.Module]:
    return {path.name: ast.parse(path.read_text()) for path in (SOURCE / "_client").glob("*.py")}


def test_the_client_gets_nothing_back_from_people():
    """Each call at a point of `_client/people.py` is a statement of its own: no decision can depend on it."""
    called = set()
    for name, tree in client_texts().items():
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        alone = {id(each.value if isinstance(each, ast.Await) else each) for each in statements}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (point := point_of(node.func)) is not None:
                assert id(node) in alone, f"{name}:{node.lineno} uses what {ast.unparse(node.func)} returns"
                called.add(point)
    declared = next(
        node for node in client_texts()["people.py"].body if isinstance(node, ast.ClassDef) and node.name == "People"
    )
    points = {node.name for node in declared.body if isinstance(node, ast.FunctionDef)}
    assert called == points | {"say_more"}


def point_of(function: ast.expr) -> str | None:
    """The point of `people.released` or `self.say_more`."""
    if not isinstance(function, ast.Attribute):
        return None
    is_point = function.attr == "say_more" or ast.unparse(function.value).rpartition(".")[2] == "people"
    return function.attr if is_point else None


def test_the_client_looks_at_nothing_that_observers_keep():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in client_texts().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "observation"
    ]
    assert not found
