"""`manage.py locks ls|show|revoke`: the command line of interlock, with the server and the prefix of the settings."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

import argparse
import contextlib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from django.core.cache import caches
from django.core.management.base import BaseCommand, CommandError

from interlock.cli import WITHOUT_TYPER
from interlock.cli.exit_status import EX_UNAVAILABLE, EX_USAGE
from interlock.contrib.django.settings import DEFAULT, Alias, alias_of
from interlock.errors import ConfigError, LockError

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

__all__ = ["Command"]

NAMES: Final = ("ls", "show", "revoke")


class Command(BaseCommand):
    """Runs a command of `interlock.cli`, which parses its own options."""

    help = "List locks, show who holds one, or take one away. manage.py locks ls --help has the options of each."
    requires_system_checks: list[str] = []  # noqa: RUF012 (as Django has it)  # it is needed when something is wrong

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the words of the command as they are."""
        parser.add_argument("--alias", default=DEFAULT, help="Which of INTERLOCK is meant. Default: default.")
        parser.add_argument("subcommand", choices=NAMES)
        parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...")

    def handle(self, *_: Any, alias: str, subcommand: str, words: list[str], **__: Any) -> None:
        """Run it. Raises CommandError; exits with the status of the command, if that is not 0."""
        try:
            typer = import_module("typer")
            module = import_module(f"interlock.cli.{subcommand}")
        except ModuleNotFoundError as missing:
            if missing.name not in {"typer", "rich"}:
                raise
            raise CommandError(WITHOUT_TYPER, returncode=EX_UNAVAILABLE) from missing
        command: Any = typer.main.get_command(module.app)
        with contextlib.redirect_stdout(self.stdout._out):
            try:
                context = command.make_context(
                    f"manage.py locks {subcommand}", words, help_option_names=["-h", "--help"]
                )
                _name_the_server(context, alias_of(alias))
                with context:
                    status = command.invoke(context)
            except (typer.Abort, KeyboardInterrupt):
                sys.exit(130)
            except ConfigError as error:
                raise CommandError(str(error), returncode=EX_USAGE) from error
            except LockError as error:
                raise CommandError(str(error), returncode=EX_UNAVAILABLE) from error
            except Exception as error:  # of a class of click, which some versions of typer bring along
                if (message := getattr(error, "format_message", None)) is not None:
                    raise CommandError(message(), returncode=EX_USAGE) from error
                if (status := getattr(error, "exit_code", None)) is None:
                    raise
                # else --help
        if status:
            sys.exit(status)


def _name_the_server(context: Any, alias: Alias) -> None:
    """Put the server and the prefix of the alias in place of options that were not given."""
    given: dict[str, Any] = context.params
    if not given.get("url") and alias.server:
        target = caches[alias.target] if alias.server == "CACHE" else alias.target
        given["url"] = target if alias.server == "QUORUM" else [target]
    if given.get("prefix") is not None and context.get_parameter_source("prefix").name == "DEFAULT":
        given["prefix"] = alias.prefix
