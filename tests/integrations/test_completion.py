"""Tab in real shells: which words bash, zsh and fish offer, what they insert, and what they never do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
import typer

from harness.clock import machine_time
from harness.modes import wait_until
from harness.servers import DEBIAN
from interlock import Interlock
from interlock.cli import app
from interlock.cli.completion import answer
from interlock.cli.completion.bash import insertable, plain, split
from interlock.cli.completion.words import candidates
from interlock.embedded import Server
from interlock.primitives.registry import Listed

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="a server of valkey-9.1")
BIN = Path(sys.executable).parent
INTERLOCK = BIN / "interlock"
HOSTILE = "quote'$(touch hit)`touch hit`;touch hit "
GROUP = typer.main.get_command(app.app)
NAMES = ["stock:42", "stock:42:left", "two words", HOSTILE]
PROMPT = "<ready> "


@pytest.fixture(scope="module")
def server():
    """A server with names of which a process holds or awaits locks."""
    with Server() as made, Interlock(made.url) as locks:
        leases = [locks.lock(name).acquire() for name in NAMES]
        wait_until(lambda: len(locks.ls()) == len(NAMES))
        yield made
        for lease in leases:
            lease.release()


class Shell:
    """An interactive shell in a terminal, in an empty directory."""

    def __init__(self, command, options, environment, directory):
        self.directory, self.name = directory, Path(command).name
        # Half a second for the server is enough for somebody who types, and too little for a machine with much to do.
        (directory / "patience").mkdir()
        (directory / "patience/sitecustomize.py").write_text(
            "from interlock.cli.completion import names\nnames.WITHIN = 60\n"
        )
        environment = {
            "PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(directory), "TERM": "dumb", "LANG": "C.UTF-8", "PS1": PROMPT,
            "PYTHONPATH": str(directory / "patience"), **environment,
        }  # fmt: skip
        self.terminal = pexpect.spawn(
            str(command), options, env=environment, cwd=str(directory), encoding="utf-8", timeout=60,
            dimensions=(50, 200),
        )  # fmt: skip

    def wait(self, *wanted):
        for each in wanted:
            self.terminal.expect_exact(each)

    def type(self, text):
        self.terminal.send(text)

    def run(self, line):
        self.terminal.sendline(line)

    def close(self):
        self.terminal.close(force=True)


def bash(server, directory):
    shell = Shell(
        shutil.which("bash"), ["--norc", "--noprofile", "-i"], {"INTERLOCK_URL": server.url, "PS1": ""}, directory
    )
    shell.run("bind 'set show-all-if-ambiguous on'; bind 'set bell-style none'; bind 'set enable-bracketed-paste off'")
    shell.run(f'eval "$(interlock completion bash)"; PS1=\'{PROMPT[:3]}\'"{PROMPT[3:]}"')
    shell.wait(PROMPT)
    return shell


def zsh(server, directory):
    found = shutil.which("zsh") or next(iter(map(str, DEBIAN.glob("bin/zsh"))), None)
    if found is None:
        pytest.skip("no zsh")
    unpacked = str(DEBIAN) in found
    directory.joinpath(".zshenv").write_text(
        f"module_path=({DEBIAN}/usr/lib/*/zsh/*) fpath=({DEBIAN}/usr/share/zsh/functions/**/*(/N) "
        f"{DEBIAN}/usr/share/zsh/functions)\n" if unpacked else ""
    )  # fmt: skip
    directory.joinpath(".zshrc").write_text(
        "autoload -Uz compinit; compinit -u -D\nunsetopt prompt_cr prompt_sp\n"
        f'eval "$(interlock completion zsh)"\nPS1="{PROMPT}"\n'
    )
    shell = Shell(found, ["-d", "-i"], {"INTERLOCK_URL": server.url, "ZDOTDIR": str(directory)}, directory)
    shell.wait(PROMPT)
    return shell


def fish(server, directory):
    found = shutil.which("fish")
    if found is None and (unpacked := DEBIAN / "usr/bin/fish").exists():
        # It looks for its functions beside itself, if share and etc are there.
        (directory / "fish/bin").mkdir(parents=True)
        found = shutil.copy(unpacked, directory / "fish/bin/fish")
        (directory / "fish/share").symlink_to(DEBIAN / "usr/share")
        (directory / "fish/etc").symlink_to(DEBIAN / "etc")
        (directory / "fish/lib").mkdir()  # without the libpython that lies beside them
        for library in DEBIAN.glob("usr/lib/*/libpcre2*"):
            (directory / "fish/lib" / library.name).symlink_to(library)
    if found is None:
        pytest.skip("no fish")
    (directory / ".config/fish/completions").mkdir(parents=True)
    script = subprocess.check_output([INTERLOCK, "completion", "fish"])
    (directory / ".config/fish/completions/interlock.fish").write_bytes(script)
    (directory / ".config/fish/config.fish").write_text(
        f"function fish_prompt; echo -n '{PROMPT}'; end\nset -g fish_greeting\nset -g fish_autosuggestion_enabled 0\n"
    )
    environment = {"INTERLOCK_URL": server.url, "LD_LIBRARY_PATH": str(directory / "fish/lib")}
    shell = Shell(found, ["-i"], environment, directory)
    shell.wait(PROMPT)
    return shell


@pytest.fixture(params=[bash, zsh, fish], ids=lambda each: each.__name__)
def shell(request, server, tmp_path):
    made = request.param(server, tmp_path)
    yield made
    made.close()


def test_tab_completes_commands_options_and_names(shell):
    shell.type("interlock doc\t")
    shell.wait("interlock doctor ")
    shell.type("--js\t")
    shell.wait("--json ")
    shell.type("\x15interlock show stock:42:\t")
    shell.wait("show stock:42:left ")
    # On a terminal without cursor movement fish shows no list.
    shell.type("\x15complete -C 'interlock server st'\r" if shell.name == "fish" else "\x15interlock server st\t")
    shell.wait("start", "status", "stop")


def test_behind_two_dashes_the_shell_completes_the_other_command(shell):
    (shell.directory / "a_file_of_mine").touch()
    shell.type("interlock run stock:42 -- ca")
    shell.type("t a_fi\t")
    shell.wait("cat a_file_of_mine ")


def test_a_name_is_inserted_as_one_word_and_never_run(shell):
    """Whatever the name of a lock has in it: the command gets it as it is, and the shell runs none of it."""
    for begun, name in (("two", "two words"), ("quo", HOSTILE)):
        shell.type(f"interlock show {begun}\t--json >shown; echo end''ed\r")
        shell.wait("ended")
        assert json.loads((shell.directory / "shown").read_text())["name"] == name
    assert not (shell.directory / "hit").exists()


def test_bash_knows_quotes_other_commands_on_the_line_and_a_path(server, tmp_path):
    shell = bash(server, tmp_path)
    for line, completed in (
        ("interlock show 'two w\t", "interlock show 'two words' "),
        ('interlock show "two w\t', 'interlock show "two words" '),
        ("true; X=1 interlock show two\t", r"interlock show two\ words "),
        (f"{INTERLOCK} show two\\ w\t", "words "),
        ("interlock demo --faults=pl\t", "--faults=planned "),
        ("interlock show stock:42:x | interlock doc\t", "| interlock doctor "),
        (f"interlock show --url {server.url} stock:42:\t", "stock:42:left "),
        ("interlock run -nw 2 stock:42:\t", "stock:42:left "),
    ):
        shell.type(f"\x15{line}")
        shell.wait(completed)
    shell.close()


# What the shells ask


def listing(urls, prefix):
    """The names of a registry that is asked for these."""
    return [("stock:42", "lock"), ("urls", ",".join(urls)), ("prefix", prefix)]


def words(*line):
    found = candidates(GROUP, line[:-1], line[-1], listing)
    return [word for word, _ in found.words] if found.kind == "words" else found.kind


def test_every_command_completes_itself_its_options_and_its_names():
    assert words("") == [*app.MODULES]
    for command in app.MODULES:
        assert command in words(command[:2])
        assert "--help" in words(command, "--h")
    assert "--once" in words("run", "--o")
    assert words("run", "a", "stock") == ["stock:42"]  # several names
    assert words("show", "stock") == ["stock:42"]
    assert words("show", "a", "--a") == words("show", "--prefix", "a", "--url=b", "--a") == ["--all"]
    assert words("show", "a", "stock") == []  # one name


def test_what_stands_before_the_cursor_says_what_may_stand_there():
    assert words("run", "-nw", "") == words("run", "-c", "") == words("nosuch", "") == []
    assert words("run", "-w", "1", "stock") == words("run", "-w1", "stock") == ["stock:42"]
    assert words("demo", "--faults", "") == ["planned", "none"]
    assert words("demo", "--faults=n") == ["--faults=none"]
    assert words("completion", "") == ["bash", "zsh", "fish"]
    assert words("run", "a", "--", "") == words("run", "a", "--", "cat", "-") == "command"
    assert words("show", "--", "stock") == ["stock:42"]
    assert dict(listing(["a", "b"], "p:")) == dict(
        candidates(GROUP, ["show", "--url", "a", "--url=b", "--prefix", "p:"], "", listing).words
    )


def test_words_of_bash():
    assert split(r"interlock show 'a b' c\ d", 100) == (["interlock", "show", "a b"], r"c\ d")
    assert split("interlock show ä:b xyz", len("interlock show ä:b".encode())) == (["interlock", "show"], "ä:b")
    assert (plain(r"c\ d"), plain("'c d"), plain("'c'd"), plain("c'd")) == ("c d", "c d", None, None)
    breaks = " \t\n\"'@><=;|&(:"
    assert insertable("a:b:c d", "a:b:", breaks) == r"c\ d"
    assert insertable("a:b:c d", "a:", "") == r"a:b:c\ d"
    assert insertable("a b:c", r"a\ b:", breaks) == "c"
    assert insertable("$(x)", "", breaks) == r"\$\(x\)"
    assert insertable("$(x)", "'", breaks) == "$(x)"
    assert insertable("$(x)", '"', breaks) is insertable("it's", "'i", breaks) is None


def completed(*words, **environment):
    """What `interlock __complete WORDS` prints, and how long it takes on a machine that runs."""
    began = machine_time()
    ran = subprocess.run(
        [INTERLOCK, "__complete", *words], env={**os.environ, **environment}, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert not ran.stderr
    return ran.stdout.splitlines(), machine_time() - began


def test_a_tab_prints_no_error_and_waits_for_no_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        _, without = completed("fish", "show", "--a")
        found, took = completed("fish", "show", "", INTERLOCK_URL=silent_url)
    assert found == ["words"]
    assert took < without + 5  # what it takes to give up: half a second, on a machine that is idle
    for url in ("redis://127.0.0.1:1", "nonsense", "redis://[", ""):
        assert completed("fish", "show", "", INTERLOCK_URL=url)[0] == ["words"]
    assert completed("bash")[0] == completed("bash", "x", "y", "z")[0] == completed("fish")[0] == []


def test_a_tab_starts_no_embedded_server(tmp_path):
    assert completed("fish", "show", "", INTERLOCK_URL="embedded://", XDG_RUNTIME_DIR=str(tmp_path))[0] == ["words"]
    assert not [*tmp_path.rglob("*.sock")]


def test_commands_and_options_are_completed_without_redis_py():
    for line in ("'s'", "'run', '--'", "'show', '--'", "'run', 'x', '--', ''"):
        code = "import sys, typer; from interlock.cli import app; from interlock.cli.completion.answer import answer; "
        code += f"print(answer(typer.main.get_command(app.app), 'fish', {line})); "
        ran = subprocess.check_output([sys.executable, "-c", f"{code}print('redis' in sys.modules)"], text=True)
        assert ran.endswith("False\n"), line


def test_no_name_that_a_terminal_or_a_parser_would_misread_is_offered(server, monkeypatch):
    from interlock.cli.completion import names

    party = ()
    listed = [
        Listed("lock", name, "lock:", party, party) for name in ("a\x1b[2J", "-rf", "a\nb", "\u202eb", "fine", "[red]x")
    ]
    monkeypatch.setattr(
        names, "connect", lambda *_: SimpleNamespace(ls=lambda: [*listed, Listed("lock", "other", "p:", party, party)])
    )
    assert [name for name, _ in names.names([server.url], "lock:")] == ["[red]x", "fine"]
    monkeypatch.setattr(names, "connect", lambda *_: 1 / 0)
    assert names.names([server.url], "lock:") == []
    assert answer.answer(GROUP, "zsh", "show", "") == ["words"]
