"""Each test module says where its tests run: in words, and in one line at its top."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.matrix import BASE, CELLS, MODES, QUORUM_CELLS, WAYS, RunsOn
from harness.servers import KINDS

TESTS = Path(__file__).parents[1]
MODULES = [
    path
    for folder in ("conformance", "faults", "topologies", "integrations")
    for path in (TESTS / folder).glob("test_*.py")
]


def said_in(path: Path) -> list[pytest.Mark]:
    """The `runs_on` marks of the module's `pytestmark`, read and not run."""
    marks = [
        node
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.runs_on"
    ]
    return [
        pytest.mark.runs_on(
            *map(ast.literal_eval, mark.args), **{each.arg: ast.literal_eval(each.value) for each in mark.keywords}
        ).mark
        for mark in marks
    ]


@pytest.mark.parametrize("path", sorted(MODULES), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_test_module_says_on_which_servers_and_in_which_modes_it_runs(path):
    """That it says the truth is held by each of its tests: see conftest."""
    (mark,) = said_in(path)
    RunsOn.said_by([mark])


def test_what_a_test_says_itself_prevails_over_its_module():
    module = pytest.mark.runs_on("each server", full="every combination", quorum=True, starts="clusters").mark
    said = RunsOn.said_by([module, pytest.mark.runs_on(BASE).mark])
    assert said == RunsOn(BASE, quorum=True, starts="clusters")
    assert said.cells(full=True) == [*CELLS[BASE], *QUORUM_CELLS]
    assert RunsOn.said_by([module]).cells(full=True) == [*CELLS["every combination"], *QUORUM_CELLS]


def test_a_test_runs_only_on_cells_that_its_marks_and_fixtures_allow():
    def left_out(**reasons: set[str]) -> set[tuple[str, str]]:
        said = RunsOn("each server and way", quorum=True)
        kept = {*said.cells(full=False, **reasons)}
        return {(cell.way, cell.mode) for cell in said.cells(full=False) if cell not in kept}

    assert left_out() == set()
    assert left_out(marks={"not_on_a_quorum"}) == left_out(arguments={"clean"}) == {("quorum", "asyncio")}
    assert left_out(marks={"not_on_a_cluster"}) == left_out(fixtures={"proxy"}) == {("cluster", "threads")}
    assert {mode for _, mode in left_out(marks={"asyncio_only"})} == {"threads"}


@pytest.mark.parametrize(
    "wrong", [{"servers": "some"}, {"full": "all"}, {"modes": "gevent"}, {"servers": "its own servers"}], ids=str
)
def test_words_that_runs_on_does_not_know_are_refused(wrong):
    with pytest.raises(AssertionError, match="runs_on"):
        RunsOn(**wrong)


def test_a_test_uses_only_servers_that_its_module_names():
    (cell, *_) = CELLS[BASE]
    said = RunsOn(starts="clusters of redis-6.2, primaries with replicas")
    assert said.allows("server", BASE, cell)
    assert said.allows("cluster", "redis-6.2", cell)
    assert said.allows("sentinel", BASE, cell)
    assert not said.allows("cluster", "redis-7.0", cell)
    assert not said.allows("quorum", BASE, cell)
    assert not RunsOn().allows("server", "redis-6.2", cell)
    (other,) = [cell for cell in CELLS["each server and way"] if cell.way == "cluster"]
    assert RunsOn().allows("cluster", other.kind, other)


def test_each_server_stands_in_each_selection_of_all_servers():
    for name in ("each server", "each server in both modes", "each server and way", "every combination"):
        assert {cell.kind for cell in CELLS[name]} == {*KINDS}
        assert {cell.mode for cell in CELLS[name]} == {*MODES}
        assert all(cell.possible for cell in CELLS[name])
    for name in ("each server and way", "every combination"):
        assert {cell.way for cell in CELLS[name]} == {*WAYS} - {"quorum"}
