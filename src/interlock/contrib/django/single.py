"""`@single`: a management command that one machine runs, while the others skip it."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from django.core.management.base import BaseCommand, CommandError

from interlock.errors import ConfigError, LockError
from interlock.primitives.once import Skipped

from .aliases import locks
from .settings import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["single"]

DAY: Final = 86_400.0  # seconds
TIME: Final = "%Y-%m-%d %H:%M:%S %Z"  # for people

CommandT = TypeVar("CommandT", bound=BaseCommand)


@overload
def single(command: type[CommandT], /) -> type[CommandT]: ...
@overload
def single(
    *,
    name: str | None = None,
    at_most: float = DAY,
    at_least: float = 0.0,
    key: str | Callable[..., str] | None = None,
    using: str = DEFAULT,
) -> Callable[[type[CommandT]], type[CommandT]]: ...
def single(
    command: type[CommandT] | None = None,
    /,
    *,
    name: str | None = None,
    at_most: float = DAY,
    at_least: float = 0.0,
    key: str | Callable[..., str] | None = None,
    using: str = DEFAULT,
) -> type[CommandT] | Callable[[type[CommandT]], type[CommandT]]:
    """Decorate the Command of a management command: one machine runs it; the others print a line, and exit with 0.

    Args:
        command: the class, if the decorator has no arguments.
        name: of the work; "command:" and the name of the command by default. A format of the command's options, as in
            "import:{region}", lets one run for each region go on.
        at_most: seconds that a run may take, a day by default; then another machine may begin. A run whose process died
            is free within 30 s.
        at_least: seconds after its start before which no other run begins. Give more than the clocks and starts of your
            machines differ: a run that is over before another machine starts does not keep that one out.
        key: the command succeeds once for each key, as in "{day}".
        using: the alias in INTERLOCK.

    Raises CommandError if the locks' server does not answer, and ConfigError. `locks.assert_held(name)` is the lease.

    """

    def decorate(command: type[CommandT]) -> type[CommandT]:
        if not (isinstance(command, type) and issubclass(command, BaseCommand)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"@single decorates the class Command of a management command, not {command!r}")
        handle = command.handle
        label = f"command:{command.__module__.rpartition('.')[2]}" if name is None else name

        @functools.wraps(handle)
        def handle_once(self: CommandT, *args: Any, **options: Any) -> Any:
            begun = False

            @functools.wraps(handle)
            def work(self: CommandT, *args: Any, **options: Any) -> Any:
                nonlocal begun
                begun = True
                return handle(self, *args, **options)

            try:
                run = locks[using].once(label, at_most=at_most, at_least=at_least, key=key)(work)
                ran: Any = run(self, *args, **options)
            except LockError as error:
                if begun or isinstance(error, ConfigError):
                    raise
                raise CommandError(f"did not run: {error}", returncode=69) from error
            if not isinstance(ran, Skipped):
                return ran.value
            if options.get("verbosity", 1):
                self.stdout.write(f"skipped: {_why(ran)}")
            return None

        command.handle = handle_once
        return command

    return decorate if command is None else decorate(command)


def _why(skipped: Skipped) -> str:
    """Who runs it, or has run it, for people."""
    if skipped.started is None:
        return f"{skipped.name} is in quarantine" if skipped.quarantined else f"{skipped.name} runs elsewhere"
    started = f"{skipped.started.astimezone():{TIME}}"
    who = skipped.by or "somebody"
    if skipped.ended is None:
        return f"{who} runs {skipped.name} since {started}"
    return f"{who} ran {skipped.name} from {started} to {skipped.ended.astimezone():{TIME}}"
