"""What `interlock top` draws, and how keys change that: pure functions of a state, a snapshot and a size."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from interlock._people.motion import MOVES, STUCK
from interlock.cli.escape import safe
from interlock.cli.output import callers, moves, span
from interlock.cli.show import describe, nothing_known
from interlock.primitives.deadlocks import name_of
from interlock.primitives.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from interlock.cli.top.data import Snapshot
    from interlock.primitives.deadlocks import Deadlocked, Member, ThingName
    from interlock.primitives.registry import Listed, Party

__all__ = ["SORTS", "State", "draw", "press", "rows_of"]

SORTS: Final[dict[str, Callable[[Listed], Any]]] = {  # by name: the smallest key stands first
    "stuck": lambda row: (_rank(row), -row.waiting, -_oldest(row.waiters), -_oldest(row.holders), name_of(row)),
    "oldest": lambda row: (-max(_oldest(row.holders), _oldest(row.waiters)), name_of(row)),
    "name": lambda row: (row.name, row.kind, row.prefix),
}
HEADS: Final = ("NAME", "KIND", "HELD", "WAITING", "MOVES", "HOLDER", "AT")
FLEXIBLE: Final = (0, 5, 6)  # the columns that share what the others leave
BY: Final = {"stuck": "stuck", "oldest": "oldest", "name": "by name,"}
GAP: Final = 2  # columns between two cells
MIN_FLEXIBLE: Final = 8  # columns that a name, a holder and a place get, at least
SMALL: Final = 12  # lines that the rest needs at least, so that the selected row gets lines of its own
LINES_OF_A_DEADLOCK: Final = 7  # of two callers
PATIENCE: Final = 2.0  # seconds: an answer that is later than that is worth a line
HELP: Final = "q quit  j/k select  enter details  / filter  s sort  ? help"
DETAILS_HELP: Final = "q quit  j/k scroll  escape back"
HELP_PAGE: Final = """\
up down j k         select another row; in the details: scroll
page up page down   the same, by a page
home end g G        the first row, the last row
enter               the details: every holder and waiter, and its line of code
escape              back; or no filter
/                   only rows with this text; enter ends the text
s                   sort: what is stuck first, the oldest first, by name
r                   ask the server now
q, Ctrl-C           quit

HELD     for how long the oldest holder has had it
WAITING  how many processes (p) and callers (c) wait, and how long the oldest
MOVES    STUCK: callers wait, and nobody was granted it for ten times as long
         as its holds usually last (30 s, if nobody knows); 12/s: so many
         waiters leave the server's queue in a second
HOLDER   "handing over to": it has not begun its section yet
AT       the line of the user's code where the oldest holder acquired it

The server says who holds and who queues. The processes say the rest, some
seconds late. One that has said nothing for 15 s, or has ended, is SILENT."""


@dataclass(frozen=True)
class State:
    """What the person has chosen."""

    sort: str = "stuck"
    filter: str = ""
    typing: str | None = None
    """The text of the filter while the person types it."""
    selected: ThingName | None = None
    index: int = 0
    """Where the selected row was last: another row takes its place when it is gone."""
    page: str = "list"
    """list, details or help."""
    scroll: int = 0
    """Lines of the details or of the help that are out of sight, above."""
    quits: bool = False


def _rank(row: Listed) -> tuple[int, float]:
    """First what is stuck, then what does not move as far as anybody can tell, then what moves."""
    if not row.waiting:
        return 3, 0.0
    if row.motion == STUCK:
        return 0, 0.0
    return (2, 0.0) if row.motion == MOVES else (1, -(row.unchanged or 0.0))


def _oldest(parties: Sequence[Party]) -> float:
    return parties[0].seconds if parties else 0.0


# The keys


def press(state: State, key: str, snapshot: Snapshot, height: int) -> State:
    """The state after this key."""
    if state.typing is not None:
        return _type(state, key)
    if key in {"q", "Q"}:
        return replace(state, quits=True)
    if key in {"escape", "enter"} and state.page != "list":
        return replace(state, page="list", scroll=0)
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -height // 2, "page down": height // 2}
    steps |= {"home": -(10**9), "g": -(10**9), "end": 10**9, "G": 10**9}
    if key in steps:
        return _move(state, steps[key], snapshot)
    return _choose(state, key)


def _choose(state: State, key: str) -> State:
    if key == "?":
        return replace(state, page="help", scroll=0)
    if state.page != "list":
        return state
    names = list(SORTS)
    chosen: dict[str, dict[str, Any]] = {
        "s": {"sort": names[(names.index(state.sort) + 1) % len(names)]},
        "/": {"typing": state.filter},
        "escape": {"filter": ""},
        "enter": {"page": "details", "scroll": 0} if state.selected is not None else {},
    }
    return replace(state, **chosen.get(key, {}))


def _type(state: State, key: str) -> State:
    text = state.typing or ""
    if key == "enter":
        return replace(state, filter=text, typing=None)
    if key == "escape":
        return replace(state, typing=None)
    if key == "backspace":
        return replace(state, typing=text[:-1])
    if key == "clear":
        return replace(state, typing="")
    return replace(state, typing=text + key) if len(key) == 1 else state


def _move(state: State, steps: int, snapshot: Snapshot) -> State:
    if state.page != "list":
        return replace(state, scroll=max(0, state.scroll + steps))
    rows = rows_of(state, snapshot)
    if not rows:
        return state
    index = min(max(0, state.index + steps), len(rows) - 1)
    return replace(state, index=index, selected=name_of(rows[index]))


# The rows


def rows_of(state: State, snapshot: Snapshot) -> list[Listed]:
    """The rows in their order, without those that the filter leaves out."""
    text = (state.filter if state.typing is None else state.typing).casefold()
    rows = snapshot.rows.get((state.sort, text))
    if rows is None:
        found = [row for row in snapshot.things if text in _searched(row)] if text else snapshot.things
        rows = snapshot.rows[state.sort, text] = sorted(found, key=SORTS[state.sort])
    return rows


def _searched(row: Listed) -> str:
    parties = (*row.holders, *row.waiters)
    return "\n".join([row.name, row.kind, *(f"{each.who}\n{each.place}" for each in parties)]).casefold()


def settled(state: State, snapshot: Snapshot) -> State:
    """The state with a row selected that exists, if there is any."""
    rows = rows_of(state, snapshot)
    names = [name_of(row) for row in rows]
    if state.selected is not None and state.selected in names:
        return replace(state, index=names.index(state.selected))
    index = min(state.index, max(0, len(rows) - 1))
    if state.page == "details":  # it shows what is gone, as long as the person looks at it
        return state
    return replace(state, index=index, selected=names[index] if names else None)


# The lines


def draw(state: State, snapshot: Snapshot, width: int, height: int, now: float) -> list[Text]:
    """The screen: `height` lines, each of `width` columns at most. `now` is as Snapshot.taken_at."""
    age = max(0.0, now - snapshot.taken_at)
    head = [*_heading(state, snapshot, width, age)]
    if state.page == "list":
        body = _list(state, snapshot, width, height - len(head), age)
    else:
        lines = _help(width) if state.page == "help" else _details(state, snapshot, width)
        body = _scrolled(lines, state.scroll, height - len(head) - 1)
        body.append(Text(DETAILS_HELP, "dim"))
    drawn = [*head, *body][:height]
    for line in drawn:
        line.truncate(width, overflow="ellipsis")
    return drawn


def _heading(state: State, snapshot: Snapshot, width: int, age: float) -> Iterator[Text]:
    ping = "" if snapshot.ping is None else f"  {snapshot.ping * 1000:.1f} ms"
    clients = "" if snapshot.clients is None else f", {snapshot.clients} client{'s' * (snapshot.clients != 1)}"
    yield Text.assemble(("interlock top  ", "bold"), safe(snapshot.url), (ping + clients, "dim"))
    if snapshot.error:
        since = f" for {span(age)}" if snapshot.ping is not None else ""
        lines = Text(f"no answer{since}, trying on: {safe(snapshot.error)}", "bold red").wrap(Console(), width)
        yield from lines[:3]
        if not snapshot.things:
            return
    elif snapshot.ping is None:
        yield Text("asking the server ...", "dim")
        return
    elif age > snapshot.interval + PATIENCE:
        yield Text(f"the last answer is {span(age)} old; asking again", "bold yellow")
    silent = f" ({snapshot.silent} silent)" if snapshot.silent else ""
    chosen = f', filter "{safe(state.filter)}"' if state.filter else ""
    waiting = callers(snapshot.waiting_processes, snapshot.waiting).replace("-", "0 callers")
    processes = "1 process" if snapshot.processes == 1 else f"{snapshot.processes} processes"
    verb = "waits" if snapshot.waiting == 1 else "wait"
    yield Text(f"{snapshot.holding} held; {waiting} {verb}; {processes}{silent} in all; {BY[state.sort]} first{chosen}")


def _list(state: State, snapshot: Snapshot, width: int, height: int, age: float) -> list[Text]:
    rows = rows_of(state, snapshot)
    below = _selected(state, rows, width, age)
    if height - len(below) < SMALL:  # deadlocks, or else rows, are worth more
        below = []
    most = max(min(LINES_OF_A_DEADLOCK, height - 4), (height - len(below)) // 2)
    deadlocks = _deadlocks(snapshot.deadlocks, width, most, age)
    room = max(1, height - len(deadlocks) - len(below) - 2)
    first = min(max(0, state.index - room + 1), max(0, len(rows) - room)) if state.index >= room else 0
    body = [*deadlocks]
    if rows:
        body += _table(rows, rows[first : first + room], state, width, age)
    elif snapshot.ping is not None:
        chosen = "no row has this text" if snapshot.things else "no process says that it holds anything or waits"
        body.append(Text(chosen, "dim"))
    body = body[: height - len(below) - 1]
    body += [Text("")] * (height - len(body) - len(below) - 1)
    shown = f"  {first + 1}-{first + min(room, len(rows))} of {len(rows)}" if len(rows) > room else ""
    last = Text(HELP + shown, "dim") if state.typing is None else Text.assemble(("/", "bold"), safe(state.typing), "_")
    return [*body, *below, last]


def _table(every: Sequence[Listed], rows: Sequence[Listed], state: State, width: int, age: float) -> list[Text]:
    cells = [_cells(row, age) for row in rows]
    widths = _widths([HEADS, *cells], width)
    lines = [Text(_line(HEADS, widths), "bold")]
    for row, each in zip(rows, cells, strict=True):
        line = Text(_line(each, widths), _style(row))
        if name_of(row) == state.selected:
            line.pad_right(max(0, width - line.cell_len))
            line.stylize("reverse")
        lines.append(line)
    assert len(every) >= len(rows)
    return lines


def _style(row: Listed) -> str:
    if row.motion == STUCK or any(each.is_silent for each in row.holders):
        return "red"
    return "yellow" if row.waiting else ""


def _cells(row: Listed, age: float) -> tuple[str, ...]:
    holder, oldest = row.holders[0] if row.holders else None, _oldest(row.waiters)
    waited = f" {_short(oldest + age)}" if oldest else ""
    waits = f"{row.processes}p {row.waiting}c{waited}" if row.waiting else "-"
    kind = (row.kind in KINDS and KINDS[row.kind].short) or row.kind
    motion = moves(row.motion, row.handovers, None).partition(" ")[0]  # STUCK: HELD says for how long
    if holder is None:
        return (
            safe(row.name),
            safe(kind),
            "-",
            waits,
            motion,
            "nobody",
            safe(row.waiters[0].place) if row.waiters else "",
        )
    more = f"+{len(row.holders) - 1} " if len(row.holders) > 1 else ""
    silent = "SILENT " if holder.is_silent else ""
    handover = "" if holder.confirmed else "handing over to "
    return (safe(row.name), safe(kind), _short(holder.seconds + age), waits, motion,
            f"{silent}{handover}{more}{safe(holder.who)}", safe(holder.place))  # fmt: skip


def _short(seconds: float) -> str:
    return span(seconds).partition(" ")[0] + span(seconds).split(" ")[1][0] if seconds < 60 else _long(seconds)


def _long(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 100:
        return f"{minutes}m{int(seconds) % 60:02}"
    return f"{minutes // 60}h{minutes % 60:02}" if minutes < 100 * 60 else f"{minutes // 1440}d"


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The width of each column: what its cells need. If that is too much, names, holders and places share the rest."""
    needed = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    left = width - GAP * (len(needed) - 1) - sum(size for i, size in enumerate(needed) if i not in FLEXIBLE)
    flexible = sorted(FLEXIBLE, key=lambda i: needed[i])
    for number, i in enumerate(flexible):  # the one that needs least first: what it leaves, the others share
        needed[i] = max(MIN_FLEXIBLE, min(needed[i], left // (len(flexible) - number)))
        left -= needed[i]
    return needed


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells in columns. The end of a place says more than its beginning."""
    fitted = [_fit(cell, width) for cell, width in zip(cells[:-1], widths[:-1], strict=True)]
    return (" " * GAP).join([*fitted, _fit_end(cells[-1], widths[-1])]).rstrip()


def _fit(text: str, width: int) -> str:
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _fit_end(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[max(1, (cell_len(text) - width) // 2) :]
    return "…" + text


def _selected(state: State, rows: Sequence[Listed], width: int, age: float) -> list[Text]:
    """Who holds the selected row, and who has waited for it longest: with nothing cut off, if there is room."""
    row = next((row for row in rows if name_of(row) == state.selected), None)
    if row is None:
        return []
    prefix = f"  prefix {safe(row.prefix)!r}" if row.prefix != "lock:" else ""
    stuck = f"  stuck for {span((row.unchanged or 0.0) + age)}" if row.motion == STUCK else ""
    lines = [Text.assemble((safe(row.name), "bold"), f"  {safe(row.kind)}{prefix}", (stuck, "red"))]
    for holder in row.holders[:1]:
        verb = "held by" if holder.confirmed else "handing over to"
        more = f", and by {len(row.holders) - 1} more" if len(row.holders) > 1 else ""
        lines += _party(verb, holder, more, width, age)
    for waiter in row.waiters[:1]:
        lines += _party("awaited by", waiter, f", of {callers(row.processes, row.waiting)}", width, age)
    return [Text("─" * width, "dim"), *lines]


def _party(verb: str, first: Party, more: str, width: int, age: float) -> list[Text]:
    fence = f", fence {first.fence}" if first.fence else ""
    lasted = f" for {span(first.seconds + age)}" if first.seconds else ""
    text = f"{verb} {safe(first.who)}{lasted}{fence}{more}"
    place = safe(first.place) or "a line that its process has not told yet"
    lines = [Text(_fit(text, width - 2).rstrip()), Text(f"  at {_fit_end(place, width - 7)}")]
    if first.gone:
        lines.append(Text("  its process has ended", "red"))
    elif first.is_silent:
        ago = span(first.reported_ago + age)
        lines.append(Text(f"  its process has not reported for {ago}: dead, stopped or cut off", "red"))
    for line in lines:
        line.pad_left(2)
    return lines


def _deadlocks(found: Sequence[Deadlocked], width: int, most: int, age: float) -> list[Text]:
    """The deadlocks, in `most` lines at most."""
    lines = [line for each in found for line in _deadlock(each, width, age)]
    if len(lines) > most:
        lines = [*lines[: most - 1], Text("  and more: a taller terminal shows it, and interlock doctor", "red")]
    return lines


def _deadlock(found: Deadlocked, width: int, age: float) -> Iterator[Text]:
    behind = f"; {found.behind} more wait behind it" if found.behind else ""
    yield Text(f"{found.title.upper()}, for {span(found.seconds + age)}{behind}", "bold red")
    for member in found.members:
        yield from _member(member, width)


def _member(member: Member, width: int) -> Iterator[Text]:
    def line(what: str, thing: ThingName, place: str) -> Text:
        said = f"{what} {safe(thing.name)} "
        return Text(f"    {said}at {_fit_end(safe(place), max(20, width - 8 - cell_len(said)))}", "red")

    yield Text(f"  {safe(member.waiter.who)}", "bold red")
    for held in member.holds:
        yield line("holds", held.thing, held.party.place)
    yield line("waits for", member.thing, member.waiter.place)


def _details(state: State, snapshot: Snapshot, width: int) -> list[Text]:
    """What `interlock show` says of the selected name."""
    view = snapshot.details
    if state.selected is None or view is None or view.name != state.selected.name:
        name = safe(state.selected.name) if state.selected is not None else ""
        return [Text(name, "bold"), Text("asking the server ..." if not snapshot.error else "not known now", "dim")]
    if view.kind is None:
        return list(Text(nothing_known(view)).wrap(Console(), width))
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    describe(out, view)
    assert isinstance(out.file, io.StringIO)
    lines = list(Text.from_ansi(out.file.getvalue()).split("\n", allow_blank=False))
    return [part for line in lines for part in line.wrap(Console(), width)]


def _help(width: int) -> list[Text]:
    return [line for each in HELP_PAGE.splitlines() for line in (Text(each).wrap(Console(), width) or [Text("")])]


def _scrolled(lines: list[Text], scroll: int, room: int) -> list[Text]:
    first = min(scroll, max(0, len(lines) - room))
    shown = lines[first : first + room]
    return [*shown, *[Text("")] * (room - len(shown))]
