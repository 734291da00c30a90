"""Which words may stand at the cursor, behind those before it.

Theory. The parser of the command line knows the options and arguments of each command, so nothing is written twice. A
command's module is imported when the command is among the words, and not before.

This reads only what every version of click and typer has: the names of commands, and their `params`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["COMMAND", "FILES", "WORDS", "Candidates", "candidates"]

WORDS: Final = "words"  # these
FILES: Final = "files"  # the shell knows them
COMMAND: Final = "command"  # the words of another command, which the shell completes as if it stood alone
HELP: Final = [("--help", "Show this message and exit.")]

Words: TypeAlias = list[tuple[str, str]]  # each with what it means
Names: TypeAlias = "Callable[[Sequence[str], str], Words]"  # of the locks on the servers of these URLs, with a prefix


@dataclass
class Candidates:
    """What may stand at the cursor."""

    kind: str
    words: Words = field(default_factory=Words)


@dataclass
class _Line:
    """What the words before the cursor have named."""

    command: Any  # of click
    arguments: int = 0
    given: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    wants: Any = None  # an option, whose value the next word is
    only_arguments: bool = False
    is_other_command: bool = False


def candidates(group: Any, words: Sequence[str], current: str, names: Names) -> Candidates:
    """What may stand behind these words, and begins with `current`. `group` has all commands."""
    if not words and not current.startswith("-"):
        return _beginning(group.summaries(), current)
    line = _read(group, words)
    if line is None:
        return Candidates(WORDS)
    if line.is_other_command:
        return Candidates(COMMAND)
    if line.wants is None and not line.only_arguments and current.startswith("-"):
        option, equals, value = current.partition("=")
        if not equals:
            return _beginning(_options(line.command), current)
        parameter, _ = _option(line.command, option)
        found = _values(parameter, line, names) if parameter is not None else Candidates(WORDS)
        found.words = [(f"{option}={each}", text) for each, text in found.words if each.startswith(value)]
        return found
    return _values(line.wants, line, names, current) if line.wants is not None else _argument(line, names, current)


def _read(group: Any, words: Sequence[str]) -> _Line | None:
    """What the words mean; None if there is no such command."""
    line, rest = _Line(group), list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" and not line.only_arguments:
            line.only_arguments, line.is_other_command = True, words[0] == "run"
        elif word.startswith("-") and word != "-" and not line.only_arguments:
            _read_option(line, word, rest)
        elif hasattr(line.command, "get_command"):
            command = line.command.get_command(None, word)
            if command is None:
                return None
            line.command, line.arguments = command, 0
        else:
            line.arguments += 1
    return line


def _read_option(line: _Line, word: str, rest: list[str]) -> None:
    parameter, value = _option(line.command, word)
    if parameter is None:
        return
    if value is None and rest:
        value = rest.pop(0)
    if value is None:
        line.wants = parameter
    else:
        line.given.setdefault(parameter.name, []).append(value)


def _option(command: Any, word: str) -> tuple[Any, str | None]:
    """The option that takes a value, with its value if that is in the same word; None for a flag or no option."""
    by_name = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        each = by_name.get(name)
        return (each, value if equals else None) if _takes_value(each) else (None, None)
    for at, letter in enumerate(word[1:], 2):  # as in -nw 2
        each = by_name.get(f"-{letter}")
        if _takes_value(each):
            return each, word[at:] or None
    return None, None


def _takes_value(parameter: Any) -> bool:
    return parameter is not None and not parameter.is_flag and not parameter.count


def _options(command: Any) -> Words:
    found = [
        (name, each.help or "")
        for each in command.params
        if each.param_type_name == "option" and not each.hidden
        for name in each.opts
        if name.startswith("--")
    ]
    return found if any(name == "--help" for name, _ in found) else found + HELP


def _argument(line: _Line, names: Names, current: str) -> Candidates:
    if hasattr(line.command, "list_commands"):
        found = [(name, line.command.get_command(None, name)) for name in line.command.list_commands(None)]
        return _beginning([(name, each.get_short_help_str(80)) for name, each in found if not each.hidden], current)
    arguments = [each for each in line.command.params if each.param_type_name == "argument"]
    if line.arguments < len(arguments):
        return _values(arguments[line.arguments], line, names, current)
    if arguments and arguments[-1].nargs == -1:
        return _values(arguments[-1], line, names, current)
    return Candidates(WORDS) if line.only_arguments else _beginning(_options(line.command), current)


def _values(parameter: Any, line: _Line, names: Names, current: str = "") -> Candidates:
    """What an option or an argument takes: its choices; the name of a lock, by its metavar; or a file."""
    metavar = str(parameter.metavar or "").strip("[].").removesuffix("...")
    if parameter.param_type_name == "argument" and metavar in {"NAME", "PATTERN"}:
        prefix = line.given.get("prefix", ["lock:"])[-1]
        return _beginning(names(line.given.get("url", []), prefix), current)
    context = line.command.make_context(None, [], resilient_parsing=True)
    choices = parameter.shell_complete(context, current)
    if metavar in {"FILE", "PATH"} or any(each.type != "plain" for each in choices):
        return Candidates(FILES)
    return _beginning([(str(each.value), each.help or "") for each in choices], current)


def _beginning(words: Words, current: str) -> Candidates:
    return Candidates(WORDS, [(word, text) for word, text in words if word.startswith(current)])
