"""docs/versions.md and the classifiers say what scripts/versions ran."""

from __future__ import annotations

import json
import tomllib

from harness import versions


def test_the_page_has_the_rows_that_ran():
    rows = json.loads(versions.RESULTS.read_text())
    assert rows
    assert versions.page(rows) == versions.PAGE.read_text()


def test_the_classifiers_name_the_pythons_on_which_the_core_passed():
    rows = json.loads(versions.RESULTS.read_text())
    passed = {row["python"] for row in rows} - {row["python"] for row in rows if row["failed"]}
    classifiers = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = {each.rpartition(" ")[2] for each in classifiers if each.startswith("Programming Language :: Python :: 3.")}
    assert named == {each for each in passed if not each.endswith("t")}
    assert any("Free Threading" in each for each in classifiers) == any(each.endswith("t") for each in passed)


def test_counts_are_those_of_the_report(tmp_path):
    server = '<properties><property name="server" value="{}"/></properties>'
    case = '<testcase classname="tests.a" name="{}">' + server + "{}</testcase>"
    bodies = [("one", "redis-6.2", ""), ("two", "redis-6.2", "<failure/>"), ("three", "valkey-9.1", "<skipped/>")]
    cases = (
        "".join(case.format(*each) for each in bodies) + '<testcase classname="tests.a" name="four"><error/></testcase>'
    )
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    numbers = versions.counted(versions.outcomes(report))
    assert numbers["redis-6.2"] == [1, 1, 0]
    assert numbers["valkey-9.1"] == [0, 0, 1]
    assert numbers[""] == [0, 1, 0]
    assert versions.cell(numbers["redis-6.2"]) == "1, **1 failed**"
