"""Makes docs/versions.md: the core of the tests under each Python, redis-py and hiredis, on each server.

scripts/versions --write 3.14      runs the rows of Python 3.14 anew and writes the page
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "versions.md"
RESULTS: Final = ROOT / "docs" / "versions.json"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.13t", "3.14", "3.15")
SERVERS: Final = {
    "valkey-9.1": "Valkey 9.1", "valkey-8.1": "Valkey 8.1", "redis-8.2": "Redis 8.2", "redis-7.0": "Redis 7.0",
    "redis-6.2": "Redis 6.2", "": "no server",
}  # fmt: skip
# The core: what every other module stands on. Conformance runs on each server in both modes.
ON_EACH_SERVER: Final = ("test_lock.py", "test_rwlock.py", "test_every.py")
CORE: Final = (
    ("--each-server", *(f"tests/conformance/{name}" for name in ON_EACH_SERVER)),
    # but for the test of the page, which the row is about to change
    ("--ignore=tests/unit/test_versions_page.py", "tests/unit", "tests/faults/test_connections.py"),
)
NEWEST, BOTH, REDIS, HIREDIS = "", "--oldest", "--oldest=redis", "--oldest=hiredis"  # which clients: scripts/test
PROBE: Final = (
    "import platform, redis, hiredis; print(platform.python_version(), redis.__version__, hiredis.__version__)"
)
OUTCOMES: Final = ("passed", "failed", "skipped")

Row = dict[str, Any]  # python, clients, build, redis, hiredis, on, servers: {server: [passed, failed, skipped]}, failed


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Each test of a JUnit report: its server ("" without one) and its outcome."""
    found: dict[str, tuple[str, str]] = {}
    for case in ET.parse(report).iter("testcase"):
        said = {each.get("name"): each.get("value") for each in case.iter("property")}
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = str(said.get("server") or ""), outcome
    return found


def counted(tests: Mapping[str, tuple[str, str]]) -> dict[str, list[int]]:
    """Server -> how many tests passed, failed and were skipped."""
    numbers = Counter(tests.values())
    return {server: [numbers[server, outcome] for outcome in OUTCOMES] for server in SERVERS}


HERE: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"  # the Python of .venv runs without --python


def options_of(python: str, clients: str) -> list[str]:
    """The options of scripts/test for this row."""
    return [*(() if python == HERE else ("--python", python)), *((clients,) if clients else ())]


def environment_of(python: str, clients: str) -> tuple[Path, dict[str, str]]:
    """Its interpreter, and the environment variables with which it has these clients."""
    directory = ROOT / (".venv" if python == HERE else f".venv-{python}")
    names = ["redis", "hiredis"] if clients == BOTH else [clients.partition("=")[2]] if clients else []
    first = os.pathsep.join(str(directory / "oldest" / name) for name in names)
    no_lock = {"PYTHON_GIL": "0"} if python.endswith("t") else {}
    return directory / "bin" / "python", os.environ | {"PYTHONPATH": first} | no_lock


def ran(command: Iterable[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], cwd=ROOT, capture_output=True, text=True, check=False, **more)


def row(python: str, clients: str) -> Row | str:
    """Run the core for this Python and these clients; the reason, as a text, if these can't be installed together."""
    options = options_of(python, clients)
    made = ran(["scripts/test", *options, "--collect-only", "-q", "tests/unit/test_resp.py"])
    if made.returncode != 0:
        return (made.stderr.strip() or made.stdout.strip()).splitlines()[-1]
    interpreter, environment = environment_of(python, clients)
    build, redis, hiredis = ran([interpreter, "-c", PROBE], env=environment).stdout.split()
    tests: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        for core in CORE:
            ran(["scripts/test", *options, "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *core])
            first_try = outcomes(report)
            tests |= first_try
            failed = [name for name, (_, outcome) in first_try.items() if outcome == "failed"]
            if failed:  # on a busy machine a bound of time may be missed: once more, alone
                again = [as_argument(name) for name in failed]
                flags = [each for each in core if each.startswith("--")]
                ran(["scripts/test", *options, "-q", "-n", "1", f"--junit-xml={report}", *flags, *again])
                tests |= outcomes(report)
    return {
        "python": python, "clients": clients, "build": build, "redis": redis, "hiredis": hiredis,
        "on": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "servers": counted(tests),
        "failed": sorted(name for name, (_, outcome) in tests.items() if outcome == "failed"),
    }  # fmt: skip


def as_argument(name: str) -> str:
    """The test of a report as pytest's command line takes it."""
    module, _, test = name.partition("::")
    return f"{module.replace('.', '/')}.py::{test}"


def cell(numbers: list[int]) -> str:
    passed, failed, skipped = numbers
    return f"{passed}" + (f", **{failed} failed**" if failed else "") + (f", {skipped} skipped" if skipped else "")


def table(rows: Iterable[Row]) -> str:
    """The rows as a table."""
    titles = ["Python", "redis-py", "hiredis", *SERVERS.values(), "ran on"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for each in rows:
        build = each["build"] + (" free-threaded" if each["python"].endswith("t") else "")
        numbers = [cell(each["servers"][server]) for server in SERVERS]
        lines.append(f"| {' | '.join([build, each['redis'], each['hiredis'], *numbers, each['on']])} |")
    return "\n".join(lines) + "\n"


def order(each: Row) -> tuple[Any, ...]:
    number = each["python"].removesuffix("t")
    return int(number.partition(".")[2]), each["python"].endswith("t"), each["redis"] < "6", each["hiredis"]


def page(rows: list[Row]) -> str:
    """docs/versions.md with the table of these rows."""
    head, _, rest = PAGE.read_text().partition("<!-- table -->\n")
    _, _, tail = rest.partition("<!-- end of the table -->\n")
    failures = "".join(
        f"- Python {each['build']}, redis-py {each['redis']}, hiredis {each['hiredis']}: `{name}`\n"
        for each in rows for name in each["failed"]
    )  # fmt: skip
    failed = f"\nFailed:\n\n{failures}" if failures else ""
    return f"{head}<!-- table -->\n\n{table(rows)}{failed}\n<!-- end of the table -->\n{tail}"


def wanted_rows(pythons: Iterable[str], rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield each Python with its clients: the newest ones, then the oldest, then one old one beside a new one.

    The last under the Python of .venv only, and under Pythons that have no row with both old ones.
    """
    yield from ((python, NEWEST) for python in pythons)
    yield from ((python, BOTH) for python in pythons)
    for python in pythons:
        if python == HERE or not any(each["python"] == python and each["clients"] == BOTH for each in rows):
            yield from ((python, clients) for clients in (REDIS, HIREDIS))


def main() -> None:
    given = [each for each in sys.argv[1:] if each != "--write"]
    rows: list[Row] = json.loads(RESULTS.read_text())
    for python, clients in wanted_rows(given or PYTHONS, rows):
        made = row(python, clients)
        rows[:] = [each for each in rows if (each["python"], each["clients"]) != (python, clients)]
        if isinstance(made, str):
            print(f"Python {python} {clients}: {made}", file=sys.stderr, flush=True)
            continue
        rows.append(made)
        rows.sort(key=order)
        print(table([made]).splitlines()[-1], *made["failed"], sep="\n", flush=True)
        if "--write" in sys.argv:
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
