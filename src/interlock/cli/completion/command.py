"""The command `interlock completion`: prints the script that a shell reads at its start."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

EPILOG = """\b
bash   echo 'eval "$(interlock completion bash)"' >>~/.bashrc
zsh    echo 'eval "$(interlock completion zsh)"' >>~/.zshrc      behind the line with compinit
fish   interlock completion fish >~/.config/fish/completions/interlock.fish

Then start a new shell. Tab completes commands, options, and the names that processes hold or wait for: it asks the
server of --url or $INTERLOCK_URL, for half a second at most. Behind `interlock run NAME --` it completes the command.

Exit status: 0, or 64 for another shell."""


class Shell(StrEnum):
    """The shells that have a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command("completion", epilog=EPILOG)
def completion(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the script that completes the words of interlock in your shell."""
    print(files("interlock.cli.completion").joinpath(f"interlock.{shell}").read_text(), end="")
