"""The benchmarks run, judge by the goals that the docs name, and say where the docs explain a missed goal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
GOALS = (ROOT / "docs" / "internals" / "goals.md").read_text()


@pytest.fixture(scope="module")
def bench():
    """The modules of the benchmarks, which are scripts: they import each other by their short names."""
    before = {*sys.modules}
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import goals
        import measure
        import mixed
        import outages
        import pages
        import picture
        import plots
        import record
        import report
        import rows
        from growth import command, model, simulated

        yield type(
            "bench", (), {"goals": goals, "measure": measure, "report": report, "ROWS": rows.ROWS}
            | {"growth": command, "model": model, "simulated": simulated, "outages": outages}
            | {"pages": pages, "picture": picture, "plots": plots, "record": record, "mixed": mixed},
        )  # fmt: skip
    finally:
        sys.path.remove(str(ROOT / "bench"))
        for name in {*sys.modules} - before:
            if getattr(sys.modules[name], "__file__", None) and f"{ROOT / 'bench'}/" in sys.modules[name].__file__:
                del sys.modules[name]


def run(*options, timeout=90):
    command = [sys.executable, str(ROOT / "bench" / "run.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)


def measured(*rows, timeout=90):
    """What a quick run says of these rows, as JSON."""
    ended = run("--quick", *rows, "--json", "-", timeout=timeout)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["rows"]


def test_rows_run(bench):
    """Threads, asyncio, processes of their own, the slow link, messages sent again: a row of each sort."""
    wanted = ["uncontended", "tasks", "handover", "slow-link", "server-time", "server-handover", "registry"]
    wanted += ["quorum-contended", "quorum-handover"]
    wanted += ["observers"] if find_spec("opentelemetry.sdk") else []
    outcomes = measured(*wanted)
    assert {outcome["row"] for outcome in outcomes} == {*wanted}
    for outcome in outcomes:
        assert outcome["contenders"][outcome["ours"]]["median"] > 0, outcome
        for goal in bench.goals.GOALS.get(outcome["row"], ()):
            installed = {*outcome["contenders"], bench.goals.BLPOP, bench.goals.BEFORE}  # these may be missing
            assert goal.of not in {"", outcome["ours"]} or goal.against in installed, goal


@pytest.mark.full
def test_every_row_runs(bench, tmp_path):
    outcomes = measured("all", "--before", str(ROOT), timeout=300)
    assert {outcome["row"] for outcome in outcomes} == {*bench.ROWS}
    assert all("before" in outcome["contenders"] for outcome in outcomes if outcome["row"] == "server-time")


def test_a_row_that_does_not_exist_is_refused_with_those_that_do():
    ended = run("uncontendet")
    assert ended.returncode == 64
    assert "there is no row uncontendet. The rows are uncontended, tasks" in ended.stderr


def test_the_list_says_what_each_row_measures_and_its_goal(bench):
    said = " ".join(run("--list").stdout.split())
    for name, row in bench.ROWS.items():
        assert re.search(rf"(^| ){name} ", said), name
        assert " ".join(row.measures.split()) in said
        assert (row.goal(name) or "none") in said


def test_the_pages_have_every_row(bench):
    explained = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", GOALS, re.MULTILINE)
    assert re.findall(r"`([a-z-]+)`", " ".join(explained)) == [*bench.ROWS]
    design = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/internals/DESIGN.md").read_text(), re.MULTILINE)
    assert {*design} == {name for name, row in bench.ROWS.items() if row.usual and row.goal(name)}


def test_each_goal_of_the_code_stands_in_the_design(bench):
    lines = (ROOT / "docs/internals/DESIGN.md").read_text().splitlines()
    for name, goals in bench.goals.GOALS.items():
        if bench.ROWS[name].usual:
            (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
            for goal in goals:
                assert str(goal).removesuffix(" ×") in line, (name, goal)


def test_each_figure_of_the_pages_is_that_of_the_recorded_run(bench):
    """A sentence that says another number than the run beside it was the fault that this prevents."""
    numbers = bench.record.read()
    assert "README.md" in {page.name for page in bench.pages.PAGES}
    for page in bench.pages.PAGES:
        text = page.read_text()
        assert bench.pages.FIGURE.search(text), page
        assert text == bench.pages.page_with(text, numbers, page.parent), "run: scripts/bench --again --write"
    for path, text in bench.picture.files(bench.record.outcomes_of(numbers)).items():
        assert path.read_text() == text, "run: scripts/bench --again --write"
        assert path.name in (ROOT / "README.md").read_text()


def test_no_page_has_a_mark_that_the_command_does_not_fill(bench):
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        assert page in bench.pages.PAGES or "<!--=" not in text, page
        assert text.count("<!--=") == len(bench.pages.FIGURE.findall(text)), page
        at_the_start = re.search(r"^[ >*-]*<!--=.*", text, re.MULTILINE)
        assert not at_the_start, f"{page.name}: Markdown shows such a line as it stands: {at_the_start[0]}"


def test_a_figure_is_written_with_two_digits_and_its_unit(bench):
    outcome = outcome_of(bench, latencies={bench.goals.OURS: [0.05, 1514.0]}, latency="a wait", latency_unit="ms")
    numbers = bench.record.as_json([outcome], {})
    page = "".join(f"<!--=contended/{mark}-->old<!--/-->;" for mark in (
        "interlock/median", "interlock/p50", "interlock/max", "python-redis-lock/ratio", "redis-py Lock/share",
    ))  # fmt: skip
    written = re.sub("<!--.*?-->", "", bench.pages.page_with(page, numbers))
    assert written == "900;1.5 s;1.5 s;9.0;1% of its share;"
    with pytest.raises(LookupError, match="no latencies"):
        bench.pages.page_with("<!--=contended/redis-py Lock/p50-->old<!--/-->", numbers)


def test_a_recorded_run_says_what_the_run_said(bench):
    from rich.console import Console

    outcome = outcome_of(bench, latencies={bench.goals.OURS: [1.0, 2.0]}, latency="a wait", latency_unit="ms")
    (recorded,) = bench.record.outcomes_of(json.loads(bench.record.text_of(bench.record.as_json([outcome], {}))))
    console = Console(width=112, record=True, file=io.StringIO())
    bench.report.show(console, outcome)
    said = console.export_text()
    bench.report.show(console, recorded)
    assert console.export_text() == said
    assert recorded.verdicts() == outcome.verdicts()
    assert recorded.as_json() == outcome.as_json()


def test_a_record_is_a_whole_run():
    for words in (("--write", "tasks"), ("--write", "--quick")):
        ended = run(*words)
        assert ended.returncode == 64
        assert "--write needs the usual rows" in ended.stderr
    assert "tasks  asyncio, 100 tasks on 100 locks" in run("--again", "tasks").stdout


def outcome_of(bench, **options):
    """Three contenders: redis-py is fastest, and lets threads starve."""
    peers = bench.goals
    samples = {peers.OURS: [900.0] * 3, peers.REDIS_PY: [1000.0] * 3, peers.BLPOP: [100.0] * 3}
    options = {"row": "contended", "ours": peers.OURS, "samples": samples} | options
    options = {"starving": {peers.REDIS_PY: 0.01}, "what": "crowded", "unit": "sections/s"} | options
    return bench.measure.Outcome(**options)


def test_a_peer_that_starves_others_is_no_measure_and_has_its_longest_wait_beside_it(bench):
    peers = bench.goals
    outcome = outcome_of(bench, latencies={peers.REDIS_PY: [0.1, 1514.0]}, latency="a wait", latency_unit="ms")
    (verdict,) = outcome.verdicts()
    assert (verdict.against, verdict.met) == (peers.BLPOP, True)
    starving = [line for line in bench.report.markdown([outcome], "").splitlines() if peers.REDIS_PY in line]
    assert "longest 1,514 ms; starves: a thread gets 1% of an equal share" in starving[0]
    assert outcome_of(bench, starving={}).verdicts()[0].against == peers.REDIS_PY


def test_a_missed_goal_names_the_section_that_says_why(bench):
    from rich.console import Console

    outcome = outcome_of(bench, starving={})  # 0.9 of redis-py
    console = Console(width=112, record=True, file=io.StringIO())
    bench.report.show(console, outcome)
    assert "missed: docs/internals/goals.md#contended says why" in console.export_text()
    assert "≥ 8 × [missed](#contended)" in bench.report.markdown([outcome], "")


def test_every_row_has_a_section_that_says_why(bench):
    headings = re.findall(r"^#+ (.+)$", (ROOT / bench.report.PAGE).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for row in bench.ROWS:
        page, _, anchor = bench.report.why(row).partition("#")
        assert page == bench.report.PAGE
        assert anchor in anchors, row


# pictures


def test_the_pictures_are_those_of_the_recorded_run(bench):
    """Drawn again they are the same, and each stands in a page."""
    outcomes = bench.record.outcomes_of(bench.record.read())
    drawn = bench.plots.files(outcomes)
    assert {*bench.plots.FOLDER.iterdir()} == {*drawn}
    for path, svg in drawn.items():
        assert path.read_text() == svg, "run: scripts/bench --again --plots"
        assert len(svg) < 60_000
        assert path.name in PAGE + GOALS


def test_each_table_that_compares_has_a_picture(bench):
    shown = [table for plot in bench.plots.PLOTS for group in plot.groups for table in group.tables]
    assert len(shown) == len({*shown})
    rows = [outcome.row for outcome in bench.record.outcomes_of(bench.record.read()) if len(outcome.samples) > 1]
    assert sorted(shown) == sorted((row, rows[:i].count(row) + 1) for i, row in enumerate(rows))


def test_a_run_that_is_not_recorded_is_drawn_elsewhere(tmp_path):
    ended = run("--plots")
    assert ended.returncode == 64
    assert "--plots needs a folder" in ended.stderr
    ended = run("tasks", "--again", "--plots", str(tmp_path / "plots"))
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in sorted((tmp_path / "plots").iterdir())] == ["tasks-dark.svg", "tasks-light.svg"]


def test_a_picture_shows_each_number_inside_its_frame(bench, tmp_path):
    """Of a run in which a peer is a thousand times as slow, and its rounds are far apart."""
    peers = bench.goals
    samples = {peers.OURS: [900.0, 1000.0, 1100.0], peers.REDIS_PY: [1.0, 500.0, 4000.0]}
    latencies = {peers.OURS: [0.1, 0.2], peers.REDIS_PY: [0.1, 15140.0]}
    options = {"latencies": latencies, "latency": "a wait", "latency_unit": "ms"}
    contended = outcome_of(bench, samples=samples, **options)
    fair = outcome_of(bench, samples={peers.FAIR: [10.0] * 3}, row="fair", ours=peers.FAIR, starving={})
    (light, dark) = bench.plots.files([contended, fair], tmp_path).items()
    assert (light[0].name, dark[0].name) == ("contended-light.svg", "contended-dark.svg")
    assert light[1] != dark[1]
    words = re.findall(r">([^<]+)</text>", light[1])
    assert {"1,000", "500", "10", "15 s", "one caller gets 1% of its share", "fair=True"} <= {*words}
    for x in (*re.findall(r' (?:c?x|x2)="([\d.]+)"', light[1]), *re.findall(r"[MH]([\d.]+)", light[1])):
        assert 0 <= float(x) <= bench.plots.WIDTH


# growth


def test_growth_runs():
    curves = ("waiters", "permits", "readers", "names", "connections")
    ended = run("growth", "--quick", "--json", *curves)
    assert ended.returncode == 0, ended.stderr
    numbers = json.loads(ended.stdout)
    assert {*numbers["curves"]} == {*curves}
    values = [value for curve in numbers["curves"].values() for line in curve["series"] for value in line["values"]]
    assert all(value > 0 for value in values)


@pytest.mark.full
def test_every_curve_of_growth_runs_and_the_model_is_checked(bench):
    ended = run("growth", "--quick", "--json")
    assert ended.returncode == 0, ended.stderr
    numbers = json.loads(ended.stdout)
    assert {*numbers["curves"]} == {*bench.growth.SPECS}
    assert numbers["checks"]


def test_a_curve_that_does_not_exist_is_refused_with_those_that_do():
    ended = run("growth", "waiter")
    assert ended.returncode == 2
    assert "there is no curve waiter. The curves are waiters, permits" in ended.stderr


def test_the_page_about_growth_has_the_tables_and_pictures_of_the_recorded_numbers(bench):
    growth = bench.growth
    numbers, page = json.loads(growth.NUMBERS.read_text()), growth.PAGE.read_text()
    assert page == growth.page_with(page, numbers), "run: scripts/bench growth --again --write"
    assert {name for _, name, _ in growth.BLOCK.findall(page)} == {*growth.blocks(numbers)}
    pictures = {path.name for path in growth.PICTURES.glob("*.svg")}
    assert (
        {*re.findall(r"\(growth/([a-z-]+\.svg)\)", page)}
        == pictures
        == {f"{name}.svg" for name in (*growth.plots.PANELS, "cluster")}
    )


def test_the_same_numbers_make_the_same_pictures(bench, tmp_path):
    pytest.importorskip("matplotlib")
    numbers = json.loads(bench.growth.NUMBERS.read_text())
    curves = {name: bench.growth.Curve.from_json(data) for name, data in numbers["curves"].items()}
    first, second = (bench.growth.plots.draw(curves, tmp_path / each) for each in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize(("clients", "names", "hold"), [(50, 5, 1.0), (30, 3, 25.0)])
def test_the_model_says_what_the_simulator_counts(bench, clients, names, hold):
    """If the protocol sends other messages one day, the model must change with it."""
    pytest.importorskip("lupa")
    load = bench.model.Load(clients, names, hold)
    found = bench.simulated.count(load, 50.0)
    assert load.heartbeats == pytest.approx(found["heartbeat"], rel=0.05)
    assert 3 * load.handovers == pytest.approx(found["acquire"] + found["release"], rel=0.05)
    assert load.renewals == pytest.approx(found.get("renew", 0), rel=0.05, abs=0.05 * load.handovers)


def test_the_model_of_a_cluster(bench):
    costs = bench.model.Costs(beat=20, handover=40, client=3000, new_client=20_000, name=400)
    load = bench.model.Load(clients=100_000, names=10_000, hold=1.0)
    (one, six, many) = (bench.model.Node(load, costs, nodes) for nodes in (1, 6, 600))
    assert one.share == 1
    assert 1 / 6 < six.share < 1.1 / 6  # a little more than its share, since names fall at random
    assert one.core == pytest.approx((load.heartbeats * 20 + load.handovers * 40) / 1e6)
    assert one.breaks == "core (80%), maxclients (10,000)"
    assert not many.breaks
    most = bench.model.most_clients(costs, 1, 0.1, 1.0)
    assert bench.model.Node(bench.model.Load(most, most // 10, 1.0), costs, 1).core <= bench.model.FULL


# outages


def test_an_outage_is_measured():
    ended = run("outages", "--quick", "--json", "one-restart")
    assert ended.returncode == 0, ended.stderr
    (seconds,) = json.loads(ended.stdout)["seconds"].values()
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys(
        ("max_ttl=2", "max_ttl=1", "redis-py's Lock"), 1
    )
    assert seconds["max_ttl=2"][0] > 1.5, "a restart of a server with a log is a quarantine"


@pytest.mark.full
def test_every_outage_is_measured(bench):
    ended = run("outages", "--quick", "--json", timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert [*json.loads(ended.stdout)["seconds"]] == [*bench.outages.FAULTS]


def test_the_page_about_failovers_has_the_table_of_the_recorded_numbers(bench):
    outages = bench.outages
    numbers, page = json.loads(outages.NUMBERS.read_text()), outages.PAGE.read_text()
    assert [*numbers["seconds"]] == [*outages.FAULTS]
    assert outages.table(numbers) in page, "run: scripts/bench outages --again --write"
    assert page == outages.page_with(page, numbers)


# mixed


def test_old_and_new_locks_on_one_key_are_measured(bench):
    mixed = bench.mixed
    ours, theirs = mixed.measure_pair((mixed.OURS, mixed.REDIS_PY), pause=0.01, seconds=0.3)
    assert ours[0] + theirs[0] > 0
    numbers = {"about": {}, "seconds": 0.3, "found": [{"pair": ["a", "b"], "pause": 0.01, "rounds": [[ours, theirs]]}]}
    assert "| 10 ms | a | b |" in mixed.table(numbers)


def test_the_page_about_redis_py_has_the_table_of_the_recorded_numbers(bench):
    numbers, page = json.loads(bench.mixed.NUMBERS.read_text()), bench.mixed.PAGE.read_text()
    assert bench.mixed.table(numbers) in page, "run: scripts/bench mixed --again --write"


def test_a_fault_that_does_not_exist_is_refused_with_those_that_do():
    ended = run("outages", "kill")
    assert ended.returncode == 2
    assert "there is no fault kill. The faults are one-restart, sentinel-kill" in ended.stderr
