"""The pictures of the benchmarks page: one for each row that compares, each in light and dark, in docs/benchmarks/.

A bar is a median, the thin line on it the middle half of the rounds. Where a row has latencies, dots beside the bar
show them on a scale on which each step is ten times the one before.

The text is written by hand, as that of picture.py, and not by Matplotlib, which draws the curves of growth: so the same
numbers make the same bytes on every machine, whatever is installed, and a test can compare the files with the record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from checkouts import ROOT
from goals import BARE, BEFORE, FLOOR, FLOOR_BEFORE
from picture import THEMES, document, image, least, rounded, text, time

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from measure import Outcome
    from picture import Theme

FOLDER: Final = ROOT / "docs" / "benchmarks"
WIDTH, MARGIN, NAMES_END = 720, 12, 196  # pixels
BAR, LABEL = 14, 62  # the height of a bar; what its label needs
TAIL_START, TAIL_END = 430, 654  # the scale of the latencies beside bars
ALONE_END = 520  # the end of the scale where there are no bars: longer labels follow
LINE, HEADING = 30, 22  # the heights of a line of the picture, and of a heading
SECOND = 12  # what a second line of its name adds to a line
FEW: Final = 5  # so many steps of a scale have room for their words: with more, every other step has words
MORE, LESS = "more is better", "less is better"
REFERENCES: Final = {FLOOR: "the same messages, no Python", BARE: ""}
UNITS: Final = {"µs": 1.0, "ms": 1e3, "s": 1e6}  # of a latency, in µs


@dataclass(frozen=True)
class Group:
    """Contenders that did the same work: those of these tables of the run (the row, and which of its tables)."""

    tables: tuple[tuple[str, int], ...]
    heading: str = ""


@dataclass(frozen=True)
class Plot:
    """A picture."""

    name: str
    title: str
    bars: str  # what a bar shows; "" if there are none
    groups: tuple[Group, ...]
    left_out: frozenset[str] = frozenset({BEFORE, FLOOR_BEFORE})


def _rows(*rows: str) -> tuple[Group, ...]:
    """One group: the first table of each row."""
    return (Group(tuple((row, 1) for row in rows)),)


PLOTS: Final = (
    Plot(
        "uncontended", "Acquire + release, one thread, a lock that nobody else wants", f"pairs a second ({MORE})",
        (Group((("uncontended", 1), ("uncontended", 2))),),
    ),
    Plot(
        "tasks", "Acquire + release, 100 asyncio tasks, each on a lock of its own", f"pairs a second ({MORE})",
        (Group((("tasks", 1), ("tasks", 2))),),
    ),
    Plot(
        "contended", "32 threads in 4 processes want one lock", f"sections a second ({MORE})",
        _rows("contended", "fair"),
    ),
    Plot(
        "contended-tasks", "32 asyncio tasks in 4 processes want one lock", f"sections a second ({MORE})",
        _rows("contended-tasks"),
    ),
    Plot("handover", "From a release to the acquire of the next caller, in another process", "", _rows("handover")),
    Plot(
        "slow-link", "Acquire + release over a link that takes 1 ms each way", f"ms a pair ({LESS})",
        (Group((("slow-link", 1), ("slow-link", 2))),),
    ),
    Plot(
        "client-cpu", "What an acquire + release costs the client's processor", f"µs a pair ({LESS})",
        (
            Group((("client-cpu", 1), ("client-cpu", 2)), "one thread"),
            Group((("client-cpu", 3),), "asyncio, 100 tasks"),
        ),
    ),
    Plot(
        "waiters", "What a handover costs the server, with few waiters and with many", f"µs ({LESS})",
        (
            Group((("waiters", 1),), "the handover alone"),
            Group((("waiters", 2),), "with the heartbeats of all waiters"),
        ),
    ),
    Plot(
        "server-time", "What a call costs the server", f"µs a call ({LESS})",
        (
            Group((("server-time", 1),), "acquire + release of one lock"),
            Group((("server-time", 2),), "acquire, 100 locks in turn"),
            Group((("server-time", 3),), "release, 100 locks in turn"),
        ),
        frozenset(),
    ),
    Plot("server-handover", "What a handover costs the server", f"µs ({LESS})", _rows("server-handover"), frozenset()),
    Plot("import", "The first import of a process", f"ms ({LESS})", _rows("import"), frozenset()),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A contender of a picture."""

    name: str
    below: str  # the second line of its name: its option, or what it does to others
    is_ours: bool
    median: float
    half: tuple[float, float] | None  # the middle half of the rounds
    tail: tuple[float, float, float] | None  # p50, p99 and the longest, in µs

    @property
    def height(self) -> int:
        return LINE + (SECOND if self.below else 0)


@dataclass(frozen=True)
class Drawn:
    """A group as it is drawn."""

    heading: str
    latency: str  # of what the latencies are: "a wait"
    lines: list[Line]


def files(outcomes: Sequence[Outcome], folder: Path = FOLDER) -> dict[Path, str]:
    """The pictures that these outcomes suffice for: where each stands, and its text."""
    found = {}
    for plot in PLOTS:
        if groups := _groups(plot, outcomes):
            for theme, colours in THEMES.items():
                found[folder / f"{plot.name}-{theme}.svg"] = _Picture(plot, groups, colours).svg()
    return found


def write(outcomes: Sequence[Outcome], folder: Path = FOLDER) -> list[Path]:
    """Write them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = files(outcomes, folder)
    for path, svg in written.items():
        path.write_text(svg, encoding="utf-8")
    return [*written]


def markup(outcomes: Sequence[Outcome], name: str, way: str) -> str:
    """The lines of a page that show a picture, with a text for those who do not see it. `way`: from page to folder."""
    plot = next(plot for plot in PLOTS if plot.name == name)
    return image(way, name, f"{plot.title}. {_said(plot, _groups(plot, outcomes))}")


def _said(plot: Plot, groups: Sequence[Drawn]) -> str:
    """The picture in words."""
    parts = []
    for group in groups:
        said = "; ".join(_words(plot, line) for line in group.lines)
        parts.append(f"{group.heading}: {said}" if group.heading else said)
    what = plot.bars.partition(" (")[0] if plot.bars else "half of them faster than"
    return f"{what[0].upper()}{what[1:]}: {'. '.join(parts)}"


def _words(plot: Plot, line: Line) -> str:
    name = f"{line.name} ({line.below})" if line.below and line.name not in REFERENCES else line.name
    value = rounded(line.median) if plot.bars else time(line.tail[0], "µs") if line.tail else ""
    return f"{name} {value}" + (f", longest {time(line.tail[2], 'µs')}" if line.tail else "")


# What is shown


def _groups(plot: Plot, outcomes: Sequence[Outcome]) -> list[Drawn]:
    """The groups of a picture; none if the run lacks a table of it."""
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.row, []).append(outcome)
    if any(len(rows.get(row, ())) < number for group in plot.groups for row, number in group.tables):
        return []
    found = []
    for group in plot.groups:
        tables = [rows[row][number - 1] for row, number in group.tables]
        found.append(Drawn(group.heading, tables[0].latency, _lines(plot, tables)))
    return found


def _lines(plot: Plot, tables: Sequence[Outcome]) -> list[Line]:
    """interlock, then what it is measured against, then the peers, the best first."""
    of = {name: table for table in reversed(tables) for name in table.samples if name not in plot.left_out}
    ours = {table.ours for table in tables}
    lines = [_line(name, table, name in ours or "interlock" in name) for name, table in of.items()]
    sign = 1 if tables[0].less_is_better else -1
    usual = tables[0].ours.partition(", ")[0]

    def order(line: Line) -> tuple[bool, bool, bool, float]:
        is_usual = line.is_ours and line.name == usual and not line.below
        return not is_usual, not line.is_ours, line.name not in REFERENCES, sign * line.median

    return sorted(lines, key=order)


def _line(name: str, outcome: Outcome, is_ours: bool) -> Line:
    shown, _, below = name.partition(", ")
    if name in outcome.starving:
        below = f"one caller gets {least(outcome.starving[name])}"
    rounds = sorted(outcome.samples[name])
    half = (rounds[len(rounds) // 4], rounds[-1 - len(rounds) // 4]) if rounds else None
    scale = UNITS[outcome.latency_unit] if outcome.latency_unit else 1.0
    found = outcome.tail(name)
    tail = (found[0] * scale, found[1] * scale, found[2] * scale) if found else None
    below = REFERENCES.get(name, below)
    if name == BEFORE:
        below = outcome.remarks.get(name, "").partition(";")[0]
    return Line(shown.replace("of them", "waiters"), below, is_ours, outcome.median(name), half, tail)


# How it is drawn


@dataclass(frozen=True)
class Scale:
    """Where a time stands: each step to the right is ten times as long."""

    first: int  # powers of ten, of microseconds
    last: int
    start: int  # pixels
    end: int

    @classmethod
    def of(cls, lines: Sequence[Line], start: int, end: int) -> Scale:
        times = [each for line in lines if line.tail for each in line.tail]
        return cls(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))), start, end)

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def steps(self) -> Iterator[tuple[float, str]]:
        for power in range(self.first, self.last + 1):
            yield self.at(10.0**power), time(10.0**power, "µs").replace(".0 ", " ")


class _Picture:
    def __init__(self, plot: Plot, groups: Sequence[Drawn], theme: Theme) -> None:
        self.plot = plot
        self.groups = groups
        self.theme = theme
        self.parts: list[str] = []
        lines = [line for group in groups for line in group.lines]
        self.scale = None
        if any(line.tail for line in lines):
            start, end = (TAIL_START, TAIL_END) if plot.bars else (NAMES_END, ALONE_END)
            self.scale = Scale.of(lines, start, end)
        self.most = max(max(line.median, (line.half or (0, 0))[1]) for line in lines)
        self.longest_bar = (TAIL_START - 24 if self.scale else WIDTH) - NAMES_END - LABEL

    def svg(self) -> str:
        top = y = self._head()
        for i, group in enumerate(self.groups):
            if group.heading:
                y += HEADING // 2 if i else 0
                self._text(MARGIN, y + 12, group.heading, self.theme.muted, bold=True)
                y += HEADING
            for line in group.lines:
                self._line(y, line)
                y += line.height
        self._steps(top, y)
        return document(self.plot.title, WIDTH, y, self.parts)

    def _head(self) -> int:
        """The title, and what each column shows. Where the lines begin."""
        self._text(MARGIN, 24, self.plot.title, self.theme.ink, size=16, bold=True)
        self._text(NAMES_END, 50, self.plot.bars, self.theme.muted, size=12)
        if self.scale is None:
            return 64
        x = self.scale.start
        self._text(x, 50, f"{self.groups[0].latency} (shorter is better)", self.theme.muted, size=12)
        for offset, draw, words in ((4, self._dot, "median"), (70, self._tick, "99 %"), (122, self._ring, "longest")):
            draw(x + offset, 64, self.theme.muted)
            self._text(x + offset + 9, 68, words, self.theme.muted, size=12)
        return 98

    def _steps(self, top: int, bottom: int) -> None:
        """The lines of the scale, behind all else."""
        if self.scale is None:
            return
        steps = [*self.scale.steps]
        for i, (x, words) in enumerate(steps):
            if len(steps) <= FEW or i % 2 == 0:
                self._text(x, top - 12, words, self.theme.muted, size=11, anchor="middle")
            line = f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{bottom - 6}" stroke="{self.theme.line}"/>'
            self.parts.insert(0, line)

    def _line(self, y: int, line: Line) -> None:
        self._text(MARGIN, y + 12, line.name, self.theme.ink, bold=line.is_ours)
        if line.below:
            self._text(MARGIN, y + 26, line.below, self.theme.muted, size=11)
        colour = self.theme.ours if line.is_ours else self.theme.peer
        if self.plot.bars:
            self._bar(y, line, colour)
        if line.tail and self.scale:
            self._tail(y + BAR // 2, line, self.theme.ours if line.is_ours else self.theme.muted)

    def _bar(self, y: int, line: Line, colour: str) -> None:
        width = self._wide(line.median)
        paint = f'fill="none" stroke="{self.theme.muted}"' if line.name in REFERENCES else f'fill="{colour}"'
        self.parts.append(f'<rect x="{NAMES_END}" y="{y}" width="{width}" height="{BAR}" rx="2" {paint}/>')
        end = width
        if line.half and self._wide(line.half[1]) - self._wide(line.half[0]) >= 2:
            low, high = (NAMES_END + self._wide(each) for each in line.half)
            self._stroke(f"M{low:g} {y + BAR / 2:g}H{high:g}M{low:g} {y + 4}v6M{high:g} {y + 4}v6", self.theme.ink)
            end = max(end, self._wide(line.half[1]))
        self._text(NAMES_END + end + 7, y + 12, rounded(line.median), self.theme.ink, bold=line.is_ours)

    def _wide(self, value: float) -> float:
        return round(max(2.0, self.longest_bar * value / self.most), 1)

    def _tail(self, y: int, line: Line, colour: str) -> None:
        assert self.scale is not None
        assert line.tail is not None
        half, most, longest = (self.scale.at(each) for each in line.tail)
        self._stroke(f"M{half:g} {y}H{longest:g}", colour)
        self._dot(half, y, colour)
        self._tick(most, y, colour)
        self._ring(longest, y, colour)
        said = time(line.tail[2], "µs")
        if not self.plot.bars:
            said = f"{time(line.tail[0], 'µs')}, longest {said}"
        x = self.scale.end + 14 if not self.plot.bars else longest + 10
        self._text(x, y + 5, said, self.theme.ink, bold=line.is_ours)

    def _dot(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y}" r="4.5" fill="{colour}"/>')

    def _tick(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<rect x="{x - 1:g}" y="{y - 6}" width="2.5" height="12" fill="{colour}"/>')

    def _ring(self, x: float, y: float, colour: str) -> None:
        circle = f'<circle cx="{x:g}" cy="{y}" r="4" fill="{self.theme.page}" stroke="{colour}" stroke-width="1.5"/>'
        self.parts.append(circle)

    def _stroke(self, path: str, colour: str) -> None:
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')

    def _text(
        self, x: float, y: float, words: str, colour: str, *, size: int = 13, bold: bool = False, anchor: str = ""
    ) -> None:
        self.parts.append(text(x, y, words, colour, size=size, bold=bold, anchor=anchor))
