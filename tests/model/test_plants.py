"""The matrix of planted bugs: each plant fits, and the nets judge a planted copy and no other. See scripts/plants."""

import ast
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("lupa")

from harness.processes import lives
from plants import nets, table
from plants.__main__ import main
from plants.matrix import COUNTING, FOUND, KNOWN, LOCK, PLANTS
from plants.nets import Histories, Search, Simulator, Walk, WentWrongError
from plants.plant import PROJECT, SOURCE, Change, Plant

QUICK = {
    "nobody is woken": "simulator",
    "a cohort takes more fences than it has reserved": "unit walk",
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_fits_and_what_it_makes_can_be_read(name):
    for file, text in PLANTS[name].texts().items():
        if file.endswith(".py"):
            ast.parse(text)
        else:
            assert text != (SOURCE / file).read_text()


def test_there_are_enough_plants_and_each_has_a_net():
    assert len(PLANTS) == len(FOUND) + len(KNOWN) + len(COUNTING) >= 30
    assert all(plant.nets for plant in PLANTS.values())
    titles = {net.title for plant in PLANTS.values() for net in plant.nets}
    assert titles == {"unit walk", "simulator", "exhaustive search", "random histories", "tests"}


@pytest.mark.parametrize("name", QUICK)
def test_a_net_catches_a_plant(name, tmp_path):
    (net,) = [each for each in PLANTS[name].nets if each.title == QUICK[name]]
    found = net.search(PLANTS[name].plant(tmp_path))
    assert found.caught, found.by


@pytest.mark.parametrize(
    "net", [Simulator("no faults"), Walk(("model/test_cohort.py",))], ids=["simulator", "unit walk"]
)
def test_a_net_finds_nothing_in_a_copy_without_a_bug(net, tmp_path, monkeypatch):
    monkeypatch.setattr(nets, "LIMIT", 10.0)
    found = net.search(Plant("nothing", (), ()).plant(tmp_path))
    assert not found.caught, found.by


def test_a_change_that_no_longer_fits_is_refused():
    with pytest.raises(ValueError, match="has changed: it has 0 times, not 1, 'what nobody wrote'"):
        Plant("old", (Change(LOCK, "what nobody wrote", ""),), ()).texts()


@pytest.mark.parametrize("what", [["simulator", "no faults", "lock", "0", "1"], ["tests", "--version"]])
def test_a_net_refuses_to_test_the_original_in_place_of_the_copy(what, tmp_path):
    path = os.pathsep.join([str(PROJECT / "src"), str(PROJECT), str(PROJECT / "tests")])
    ran = subprocess.run(
        [sys.executable, "-m", "plants.inside", *what],
        env={**os.environ, "PYTHONPATH": path, "PLANTED": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 70
    assert "was imported in place of the copy" in ran.stderr
    with pytest.raises(WentWrongError):
        Simulator("no faults").judge(ran.returncode, ran.stderr, tmp_path)


def test_what_a_net_could_not_judge_is_no_miss(tmp_path):
    for net, status in ((Walk(("model/test_cohort.py",)), 4), (Search("quorum"), 2)):
        with pytest.raises(WentWrongError):
            net.judge(status, "usage: no such thing", tmp_path)


def test_histories_that_stop_all_progress_have_found_the_bug(tmp_path):
    """But not that a call is slow: a busy machine does that, too."""
    judge = Histories("single").judge
    assert judge(1, '{"broken": ["error", "no progress"], "histories": 2}', tmp_path) == (
        True,
        "single: no progress in history 2",
    )
    assert judge(1, '{"broken": ["slow"], "histories": 9}', tmp_path) == (False, "single: slow in history 9")


def test_the_table_names_what_was_missed(tmp_path):
    results = {
        table.key(plant.name, net): {"caught": True, "seconds": 1.4, "by": "seed 7"}
        for plant in PLANTS.values() for net in plant.nets
    }  # fmt: skip
    plant = KNOWN[0]
    results[table.key(plant.name, plant.nets[0])] = {"caught": False, "seconds": 300.0, "by": "4,000 seeds"}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nwhat was here\n{table.END}\nafter\n")
    table.write(results, page)
    text = page.read_text()
    assert "what was here" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert f"| {plant.name} | {plant.nets[0].title} | **missed**: 4,000 seeds | 300 |" in text
    table.write(results, page)
    assert page.read_text() == text


def test_the_page_has_a_place_for_the_table():
    text = table.PAGE.read_text()
    assert text.index(table.BEGIN) < text.index(table.END)


def test_ctrl_c_ends_the_search_under_way(tmp_path):
    """A net has a session of its own: no terminal signals it."""
    pid = tmp_path / "pid"
    (tmp_path / "sleeps.py").write_text(
        f"import os, time\nfrom pathlib import Path\nPath({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    script = (
        "import sys; from plants import __main__ as program, nets; from plants.plant import Plant\n"
        "class Sleeps(nets.Net):\n"
        "    title = 'sleeps'\n"
        f"    def command(self, scratch): return [sys.executable, {str(tmp_path / 'sleeps.py')!r}]\n"
        "program.PLANTS = {'nothing': Plant('nothing', (), (Sleeps(), Sleeps()))}\n"
        "sys.exit(program.main(['--jobs', '1']))\n"
    )
    searching = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    while not (pid.exists() and pid.read_text()):
        assert searching.poll() is None
        time.sleep(0.02)
    searching.send_signal(signal.SIGINT)
    _, err = searching.communicate(timeout=60)
    assert searching.returncode == 130
    assert err == "stopped; what was found so far is kept\n"
    assert not lives(int(pid.read_text()))


def test_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    assert main(["--list", "--net", "walk"]) == 0
    assert "unit walk" in capsys.readouterr().out
    assert main(["--only", "no such plant"]) == 2
    assert main(["--only", "nobody is woken", "--net", "simulator", "--jobs", "1"]) == 0
    assert "caught after" in capsys.readouterr().out
    assert [each["caught"] for each in json.loads((tmp_path / "results.json").read_text()).values()] == [True]
    assert main(["--only", "nobody is woken", "--net", "simulator", "--missing"]) == 2
