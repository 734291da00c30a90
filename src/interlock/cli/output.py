"""What commands print: text for people, with colours only on a terminal, and JSON for programs.

Names, labels and reasons are the words of others: before they reach a terminal, `safe` escapes what a terminal would
take for a command. Nothing is read as markup.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console
from rich.text import Text

from interlock._people.motion import MOVES, STUCK
from interlock.cli.escape import discard_output, safe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from typing import TextIO

__all__ = [
    "callers",
    "console",
    "moves",
    "print_json",
    "print_rows",
    "print_table",
    "quiet",
    "safe",
    "shortened",
    "span",
    "styled",
]

PLAIN_WIDTH: Final = 80  # columns, where no terminal says how many it has
MAX_TEXT: Final = 300  # characters of a value of somebody else
MAX_CELL: Final = 60  # columns: a longer name moves the rest of its own row, and not the other rows


def styled(text: object, style: str = "") -> Text:
    """The text of somebody else, escaped, in a style of ours."""
    return Text(safe(text), style)


def console(file: TextIO | None = None, *, soft_wrap: bool = True) -> Console:
    """A console that colours on a terminal or with FORCE_COLOR, and never with NO_COLOR. Long lines stay whole."""
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # None: no bold and no dim either
    made = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, color_system=colours)
    made.width = made.width or PLAIN_WIDTH  # COLUMNS=0
    return made


def print_rows(out: Console, rows: Iterable[tuple[str, Text | str]], indent: str = "  ") -> None:
    """Print names and values, one a line, the values below each other. A Text is printed as it is, a str escaped."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        out.print(
            Text.assemble((f"{indent}{name:<{width}}  ", "dim"), value if isinstance(value, Text) else safe(value))
        )


def print_table(out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, as wide as their widest cell up to MAX_CELL. Cells are escaped."""
    cells = [[safe(cell) for cell in row] for row in rows]
    columns = zip(heads, *cells, strict=True)
    widths = [max(width for cell in column if (width := Text(cell).cell_len) <= MAX_CELL) for column in columns]

    def line(row: Sequence[str], style: str = "") -> Text:
        padded = (cell + " " * (width - Text(cell).cell_len) for cell, width in zip(row, widths, strict=True))
        return Text("  ".join(padded).rstrip(), style)

    out.print(line(heads, "bold"))
    for row in cells:
        out.print(line(row))


def print_json(value: object) -> None:
    """Print one JSON value, all in ASCII, so that no terminal and no encoding changes it."""
    try:
        print(json.dumps(value, indent=2), flush=True)
    except BrokenPipeError:  # as in `... --json | head`
        discard_output()


def shortened(text: str) -> str:
    """This text, which somebody else wrote, cut after `MAX_TEXT` characters."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"


def span(seconds: float) -> str:
    """A duration for people: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 1 h."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    for unit, size, smaller, rest in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            more = whole % size // rest
            return f"{whole // size} {unit}" + (f" {more} {smaller}" if more else "")
    return f"{whole} s"


def callers(processes: int, number: int) -> str:
    """How many callers wait, and in how many processes: everywhere in the same words."""
    if not number:
        return "-"
    return f"{processes} process{'es' * (processes != 1)}, {number} caller{'s' * (number != 1)}"


def moves(motion: str, handovers: float | None, unchanged: float | None) -> str:
    """Whether a name for which callers wait moves or is stuck, in a column."""
    if motion == STUCK:
        return f"STUCK {span(unchanged or 0.0)}"
    if motion == MOVES:
        return "yes" if handovers is None else f"{handovers:.2g}/s" if handovers < 10 else f"{handovers:.0f}/s"
    return ""


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep the log off the terminal: the command itself says what is wrong."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
