"""scripts/soak: every net has its turn, seeds go on, and what fails is kept with the command that repeats it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("lupa")

from harness.processes import lives
from simulator.profiles import ALL
from soak import turns
from soak.__main__ import groups, main
from soak.lanes import Lanes, table
from soak.turns import Net


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "STATE", tmp_path / "state.json")


def program(tmp_path, text):
    """A net that runs this program, whose options are sys.argv."""
    file = tmp_path / "net.py"
    file.write_text("import json, sys\nfrom pathlib import Path\n" + text)
    return Net("histories, of a program", [sys.executable, str(file)], 3)


def test_every_profile_and_topology_has_its_turn():
    titles = " ".join(net.title for net in turns.endless())
    assert all(world in titles for world in ("world one", "world servers", "world quorum"))
    by_name = {name for name in ALL if f'"{name}"' in titles}
    assert {"crowd, chaos", "revoked", "late pushes", "restored twice"} <= by_name
    assert all(f"histories, {topology}" in titles for topology in ("single", "sentinel", "cluster", "quorum"))
    assert [net.title for net in turns.once()] == ["scripts/test --full", "scripts/plants"]


def test_the_seeds_continue_where_the_last_soak_ended(tmp_path):
    net = program(
        tmp_path,
        "said = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "Path(said['--json']).write_text(json.dumps({'histories': 3, 'sections': 40, 'violations': 0}))\n"
        f"Path({str(tmp_path / 'seeds')!r}).open('a').write(said['--seed'] + '\\n')\n",
    )
    for _ in range(2):
        Lanes(tmp_path / "kept", lambda _: None).run_once([net])
    assert (tmp_path / "seeds").read_text().split() == [str(turns.FIRST_SEED), str(turns.FIRST_SEED + 3)]
    assert (net.sums["runs"], net.sums["events or sections"], net.sums["turns"]) == (6, 80, 2)
    assert table([net]).endswith("nothing failed")


def test_what_fails_is_kept_with_the_command_that_repeats_it(tmp_path):
    net = program(tmp_path, "print('a lock was held twice')\nsys.exit(1)\n")
    Lanes(tmp_path / "kept", lambda _: None).run_once([net])
    (failed,) = net.failed
    assert f"--seed {turns.FIRST_SEED} --histories 3" in failed
    assert "--json" not in failed
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.read_text() == "a lock was held twice\n"
    assert failed in table([net])


def test_the_time_ends_the_lanes_and_each_net_had_a_turn(tmp_path):
    nets = [Net(f"histories, {name}", [sys.executable, "-c", "pass"]) for name in "abc"]
    Lanes(tmp_path, lambda _: None).run([nets], time.monotonic() + 3)
    assert all(net.sums["turns"] for net in nets)


def test_half_of_the_lanes_play_histories():
    nets = [*turns.endless()]
    first, second = groups(nets, 2)
    assert {net.title.partition(",")[0] for net in first} == {"histories"}
    assert {net.title.partition(",")[0] for net in second} == {"simulator"}
    assert sorted(net.title for group in groups(nets, 5) for net in group) == sorted(net.title for net in nets)
    assert groups(nets, 1) == [nets]


@pytest.mark.parametrize(
    "options", [["--hours", "0"], ["--hours", "1", "--without", "tests"], ["--hours", "1", "--only", "x y"]]
)
def test_nonsense_is_refused(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_a_short_soak_of_the_simulator_prints_its_table(capsys):
    assert main(["--hours", "0.0005", "--only", 'simulator, "late pushes"', "--lanes", "1"]) == 0
    out = capsys.readouterr().out
    assert 'simulator, "late pushes"' in out
    assert out.endswith("nothing failed\n")
    assert json.loads(turns.STATE.read_text()) == {'simulator, "late pushes"': turns.FIRST_SEED + turns.SEEDS // 4}


@pytest.mark.parametrize("which", ["once", "endless"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_turns_and_prints_the_table_in_the_background_too(number, which, tmp_path):
    """A shell lets what it runs in the background ignore SIGINT."""
    net = program(
        tmp_path,
        f"import os, time\nprint('a lock was held twice', flush=True)\n"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(600)",
    )
    script = (
        "import signal, sys; from pathlib import Path; from soak import turns, __main__ as soak\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"turns.STATE = Path({str(tmp_path / 'state.json')!r})\n"
        f"turns.once = turns.endless = lambda: []\n"
        f"turns.{which} = lambda: [turns.Net({net.title!r}, {net.command!r}, 3)] * 2\n"
        f"sys.exit(soak.main(['--hours', '1', '--lanes', '1', '--kept', {str(tmp_path / 'kept')!r}]))\n"
    )
    soak = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = tmp_path / "pid"
    while not (child.exists() and child.read_text()):
        assert soak.poll() is None
        time.sleep(0.02)
    os.kill(soak.pid, number)
    out, _ = soak.communicate(timeout=60)
    assert soak.returncode == 130
    assert net.title in out
    assert "nothing failed in the turns that ended" in out
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.read_text().startswith("a lock was held twice\n")  # what it had found before is not lost
    assert f"{net.title}: interrupted: " in out
    assert str(kept) in out
    assert not lives(int(child.read_text()))
