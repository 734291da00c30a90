"""Makes docs/rules.md: each rule of safety with the tests that hold it, from the markers in the tests.

scripts/rules        writes the page
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "rules.md"
RULES = {
    1: "The queue lives in the server and hands over. No newcomer overtakes; no walk over the queue.",
    2: "Cohorts: contenders of one process queue locally.",
    3: "Push, timer and poll. A lost message costs a poll; a message that arrives late or twice grants nothing.",
    4: "Waiters send heartbeats. A dead waiter is skipped; a lock that was handed to it is free again in seconds.",
    5: "Only the server's clock decides across machines; a client measures its leases by a clock that nobody sets.",
    6: "A lost lease is always reported, and a failed renewal is not a loss until the time is up.",
    7: "Fences only grow, and the data refuses older ones.",
    8: "Everything can be retried; a call that fails takes back its grant and its place in the queue, in bounded time.",
    9: "No key without a TTL, one hash tag for a lock, a plain string key that excludes anyone else.",
    10: "Quarantine after a failover or a restart.",
    11: "Fork, threads, tasks: a child holds nothing; ownership is the lease.",
}
INTRODUCTION = (
    "These rules keep the locks safe; the numbers are those of the [design](internals/DESIGN.md). Below each rule",
    "stand the tests that hold it: the file in `tests/`, and the name of the test as a sentence. `scripts/rules` makes",
    "this page from the marks of the tests (`@rule(8)`), and `scripts/check` fails if a rule has no test. The",
    "[simulator](simulator.md) checks the same rules under random faults.",
)
NOT_BUILT = {2: "see [DESIGN](internals/DESIGN.md#6-designed-and-not-built)"}


def marked() -> dict[int, list[tuple[str, str]]]:
    """Rule -> (file, test)."""
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


def page() -> str:
    """The text of docs/rules.md. Fails if a rule has no test."""
    lines = [
        "# The rules, and the tests that hold them",
        "",
        *INTRODUCTION,
        "",
    ]
    for number, tests in marked().items():
        lines += [f"## {number}. {RULES[number]}", ""]
        if number in NOT_BUILT:
            lines += [f"Not built: {NOT_BUILT[number]}.", ""]
            continue
        assert tests, f"rule {number} has no test"
        for file, test in tests:
            lines.append(f"- `{file}`: {test.removeprefix('test_').replace('_', ' ')}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
