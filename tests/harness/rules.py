"""Makes docs/rules.md: each rule of safety with the tests that hold it, from the markers in the tests; and each
rule of the simulator with the bugs that tests plant against it.

scripts/rules        writes the page

D1 to D11 are the rules of docs/internals/DESIGN.md: a test names its rules by their numbers, as `@rule(8)` for D8.
S1 to S15 are the rules of the simulator: `simulator/invariants/` states them, and the tables of planted bugs in
`tests/model/test_simulator*.py` (`IN_PYTHON`, `IN_LUA`, ...) say which rule each bug breaks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "rules.md"
SIMULATOR = TESTS.parent / "simulator" / "invariants" / "__init__.py"
RULES = {
    1: "The queue lives in the server and hands over. No newcomer overtakes; no walk over the queue.",
    2: "Cohorts: contenders of one process queue locally, and a lease passes from one to the next within bounds.",
    3: "Push, timer and poll. A lost message costs a poll; a message that arrives late or twice grants nothing.",
    4: "Waiters send heartbeats. A dead waiter is skipped; a lock that was handed to it is free again in seconds.",
    5: "Only the server's clock decides across machines; a client measures its leases by a clock that nobody sets.",
    6: "A lost lease is always reported, and a failed renewal is not a loss until the time is up.",
    7: "Fences only grow, and the data refuses older ones.",
    8: "Everything can be retried; a call that fails takes back its grant and its place in the queue, in bounded time.",
    9: "No key without a TTL, one hash tag for a lock, a plain string key that excludes anyone else.",
    10: "Quarantine after a failover or a restart.",
    11: "Fork, threads, tasks, signals: a child holds nothing; ownership is the lease.",
}
IN_THE_SIMULATOR = {
    1: "S1, S4 and S6", 2: "S2 and S14", 3: "S4", 4: "S3 and S4", 5: "S1 and S9", 6: "S7 and S8", 7: "S2",
    8: "S4, S5, S11 and S15", 9: "S3", 10: "S13",
}  # fmt: skip
INTRODUCTION = (
    "D1 to D11 are the rules of the [design](internals/DESIGN.md#2-the-rules-that-keep-it-safe), which keep the locks",
    "safe. Below each rule stand the tests that hold it: the file in `tests/`, and the name of the test as a sentence.",
    "S1 to S15 are [the rules that the simulator checks](#the-rules-of-the-simulator). `scripts/rules` makes this page",
    "from the marks of the tests (`@rule(8)` is D8), and `scripts/check` fails if a rule has no test.",
)
ABOUT_THE_SIMULATOR = (
    "The [simulator](simulator.md) checks these rules after each step of each run, under random faults; a violation",
    "names its rule. `simulator/invariants/__init__.py` has their whole text. Below each rule stand bugs that tests",
    "plant, and that the simulator must find because they break this rule.",
)


def marked() -> dict[int, list[tuple[str, str]]]:
    """Rule of DESIGN -> (file, test)."""
    found: dict[int, list[tuple[str, str]]] = {number: [] for number in RULES}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in {"rule", "pytest.mark.rule"}:
                    for number in decorator.args:
                        found[ast.literal_eval(number)].append((str(path.relative_to(TESTS)), node.name))
    return found


def simulated() -> dict[int, str]:
    """Rule of the simulator -> the first sentence of its text."""
    text = ast.get_docstring(ast.parse(SIMULATOR.read_text())) or ""
    items = re.findall(r"^ ?S(\d+)\. (.*?)(?=^ ?S\d+\. |^$)", text, re.MULTILINE | re.DOTALL)
    return {int(number): " ".join(item.split()).partition(". ")[0].rstrip(".") + "." for number, item in items}


def planted() -> dict[int, list[tuple[str, str]]]:
    """Rule of the simulator -> (file, planted bug that breaks it), of the tables of bugs whose values have a rule."""
    found: dict[int, list[tuple[str, str]]] = {number: [] for number in simulated()}
    for path in sorted((TESTS / "model").glob("test_simulator*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign) or not ast.unparse(node.targets[0]).startswith("IN_"):
                continue
            if not isinstance(node.value, ast.Dict):  # the subjects of a quorum
                continue
            for bug, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(bug, ast.Constant | ast.Name), ast.dump(node)
                assert isinstance(value, ast.Tuple), ast.dump(node)
                (rule,) = (
                    each.value for each in value.elts if isinstance(each, ast.Constant) and type(each.value) is int
                )
                name = bug.id.replace("_", " ") if isinstance(bug, ast.Name) else str(bug.value)
                found[rule].append((str(path.relative_to(TESTS)), name))
    return found


def page() -> str:
    """The text of docs/rules.md. Fails if a rule has no test, or no planted bug."""
    lines = ["# The rules, and the tests that hold them", "", *INTRODUCTION, ""]
    for number, tests in marked().items():
        assert tests, f"rule D{number} has no test"
        lines += [f"## D{number}. {RULES[number]}", ""]
        if number in IN_THE_SIMULATOR:
            lines += [f"The simulator checks it as {IN_THE_SIMULATOR[number]}.", ""]
        lines += [f"- `{file}`: {test.removeprefix('test_').replace('_', ' ')}" for file, test in tests]
        lines.append("")
    lines += ["## The rules of the simulator", "", *ABOUT_THE_SIMULATOR, ""]
    bugs = planted()
    for number, text in simulated().items():
        assert bugs[number], f"no planted bug breaks rule S{number}"
        lines += [f"### S{number}", "", text, ""]
        lines += [f"- `{file}`: {bug}" for file, bug in bugs[number]]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
