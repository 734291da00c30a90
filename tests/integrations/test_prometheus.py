"""The example for Prometheus, its alert rules, and the dashboard for Grafana.

Each metric and label that a query names is one that the real exporter writes, in a process that uses locks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from harness.matrix import required
from harness.modes import wait_until

try:
    import opentelemetry.exporter.prometheus as _exporter  # noqa: F401
    from prometheus_client.parser import text_string_to_metric_families

    from interlock.contrib import otel as _otel  # noqa: F401
except ModuleNotFoundError as missing:
    MISSING = str(missing)
else:
    MISSING = ""

from interlock._people.observer import Loss, Outcome
from interlock.primitives.kinds import KINDS

pytestmark = [pytest.mark.runs_on("valkey-9.1", modes="threads"), pytest.mark.xdist_group("prometheus")]
FILES = Path(__file__).parents[2] / "docs" / "observability"
ALERTS = FILES / "alerts.yml"
FROM_PROMETHEUS = {"job", "instance"}  # labels that a scrape adds
VALUES = {
    "outcome": {each.value for each in Outcome}, "reason": {each.value for each in Loss}, "interlock_kind": {*KINDS}
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def libraries():
    if MISSING:
        required(f"{MISSING}; scripts/test installs it")


def alert_queries() -> list[str]:
    """The queries of the alert rules: what stands behind each `expr: |`, indented further than that."""
    found = re.findall(r"^( +)expr: \|\n((?:\1 +.*\n)+)", ALERTS.read_text(), re.MULTILINE)
    return [query for _, query in found]


def dashboard_queries() -> list[str]:
    dashboard = json.loads((FILES / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return queries + [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]


def labels_in_texts() -> set[str]:
    """The labels that legends and annotations show."""
    dashboard = (FILES / "grafana-dashboard.json").read_text()
    return {*re.findall(r"\{\{(\w+)\}\}", dashboard), *re.findall(r"\$labels\.(\w+)", ALERTS.read_text())}


def names(query: str) -> tuple[set[str], set[str], list[tuple[str, str]]]:
    """The metrics, the labels, and the labels with the values that a query in PromQL compares them with."""
    matched = [(label, value) for inner in re.findall(r"\{([^}]*)\}", query)
               for label, value in re.findall(r'(\w+)\s*(?:=~?|!~|!=)\s*"([^"]*)"', inner)]  # fmt: skip
    labels = {label for label, _ in matched}
    for inner in re.findall(r"\bby \(([^)]*)\)", query):
        labels |= {label.strip() for label in inner.split(",")}
    labels |= {*re.findall(r"label_values\(\w+, (\w+)\)", query)}
    rest = re.sub(r"\{[^}]*\}|\bby \([^)]*\)|(?<=, )\w+(?=\)$)", "", query)
    return {*re.findall(r"\binterlock_\w+", rest)}, labels, matched


@pytest.fixture(scope="module")
def scraped(request):
    """Each metric with its labels, and the values of these, as two example programs export them."""
    server = request.getfixturevalue("server_of_module")
    environment = os.environ | {"INTERLOCK_URL": server.url}
    apps = [
        subprocess.Popen(
            [sys.executable, FILES / "app.py", "0"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        urls = [app.stdout.readline().strip() for app in apps]
        found: dict[str, dict[str, set[str]]] = {}

        def has_all() -> bool:
            for url in urls:
                for family in text_string_to_metric_families(urllib.request.urlopen(url, timeout=10).read().decode()):
                    for sample in family.samples:
                        labels = found.setdefault(sample.name, {})
                        for label, value in sample.labels.items():
                            labels.setdefault(label, set()).add(value)
            return {"interlock_renewal_slack_seconds_bucket", "interlock_hold_duration_seconds_bucket"} <= {*found}

        wait_until(has_all)
    finally:
        for app in apps:
            app.terminate()
            app.communicate()
    return found


@pytest.fixture(scope="module")
def server_of_module():
    from interlock.embedded import Server

    with Server() as server:
        yield server


@pytest.mark.parametrize("queries", [alert_queries, dashboard_queries], ids=["alerts", "dashboard"])
def test_each_query_names_metrics_labels_and_values_that_the_exporter_writes(scraped, queries):
    assert len(queries()) >= 4
    for query in queries():
        metrics, labels, matched = names(query)
        assert metrics, query
        for metric in metrics:
            assert metric in scraped, query
            assert labels - FROM_PROMETHEUS <= {*scraped[metric]} | set().union(*(scraped[each] for each in metrics)), (
                query
            )
        for label, value in matched:
            if not value.startswith("$"):
                assert {*value.split("|")} <= VALUES[label], query


def test_no_alert_is_about_callers_that_may_wait_for_ever():
    """A standby of an election waits for as long as its leader lives."""
    (query,) = [query for query in alert_queries() if "interlock_waiters" in query]
    assert 'interlock_waiters{interlock_kind!~"election|latch|barrier"}' in query


def test_the_first_loss_of_a_counter_counts():
    """With lock_names=True the counter of a name begins with its first loss, so Prometheus sees no increase."""
    queries = [query for query in alert_queries() + dashboard_queries() if "interlock_lost_total" in query]
    assert len(queries) == 3
    assert all(" unless interlock_lost_total" in query and " offset " in query for query in queries)


def test_the_share_of_no_attempts_is_no_division_by_zero():
    """The counters of a program that does nothing now stay, and their rates are 0."""
    divisors = [query.split(" / ")[1] for query in dashboard_queries() if " / " in query]
    assert divisors
    assert all(re.match(r"clamp_min\(.*, 1e-9\)$", divisor) for divisor in divisors)


def test_the_labels_in_legends_and_annotations_are_written(scraped):
    written = {label for metric, labels in scraped.items() if metric.startswith("interlock_") for label in labels}
    assert labels_in_texts() <= written | FROM_PROMETHEUS


def test_every_metric_is_on_the_dashboard(scraped):
    shown = set().union(*(names(query)[0] for query in dashboard_queries()))
    families = {re.sub(r"_(bucket|sum|count)$", "", each) for each in scraped if each.startswith("interlock_")}
    assert {re.sub(r"_(bucket|sum|count)$", "", each) for each in shown} == {
        each for each in families if not each.endswith("_created")
    }


def test_a_query_is_read_in_all_its_parts():
    query = (
        'a(0.9, sum by (le, job) (rate(interlock_x_bucket{outcome=~"b|c", job="$job"}[5m]))) > 0 '
        'unless interlock_y{reason!~"d"}'
    )
    metrics, labels, matched = names(query)
    assert metrics == {"interlock_x_bucket", "interlock_y"}
    assert labels == {"le", "job", "outcome", "reason"}
    assert matched == [("outcome", "b|c"), ("job", "$job"), ("reason", "d")]
    assert names("label_values(interlock_x_total, interlock_kind)")[:2] == ({"interlock_x_total"}, {"interlock_kind"})


@pytest.mark.full
def test_promtool_accepts_the_rules():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool")
    subprocess.run([promtool, "check", "rules", ALERTS], check=True, capture_output=True)
    subprocess.run([promtool, "check", "config", FILES / "prometheus.yml"], check=True, capture_output=True)
