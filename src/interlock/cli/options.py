"""The options that several commands share, and the Interlock that they name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from interlock.errors import ConfigError
from interlock.threads import Interlock

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TIME", "AsJson", "Name", "OnlyPrefix", "Pattern", "Prefix", "Urls", "connect", "require_url"]

TIME: Final = "%Y-%m-%d %H:%M:%S %Z"  # for people, of this machine's time zone

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The name, without the prefix.")]

Urls: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--url", metavar="URL", help="The server; several are a quorum. Default: $INTERLOCK_URL."),
]
Prefix: TypeAlias = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="The prefix of your Interlock.")]
Pattern: TypeAlias = Annotated[str, typer.Argument(metavar="[PATTERN]", help="Only names that match, as in a shell.")]
OnlyPrefix: TypeAlias = Annotated[
    str | None, typer.Option("--prefix", metavar="TEXT", help="Only those of this prefix. Default: all.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def require_url(*urls: str | None) -> None:
    """Raise ConfigError if neither the command line nor the environment names a server."""
    if not any(urls) and not os.environ.get("INTERLOCK_URL"):
        raise ConfigError("no server is named: give --url redis://host:6379/0, or set INTERLOCK_URL")


def connect(urls: Sequence[str] | None, prefix: str, label: str | None = None, *, registry: bool = False) -> Interlock:
    """Make the Interlock of these URLs; of none, that of $INTERLOCK_URL. Raises ConfigError."""
    urls = urls or ()
    require_url(*urls)
    if len(urls) > 1:
        return Interlock.quorum(urls, prefix=prefix, label=label, registry=registry)
    return Interlock(*urls, prefix=prefix, label=label, registry=registry)
