"""The picture of the README: the longest wait for one lock that many want, and how often a second they get it.

Two files, since a page with a `<picture>` follows the reader's theme and an SVG alone does not. The text is written
by hand, so the same numbers make the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

from checkouts import ROOT
from goals import FAIR, OURS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from measure import Outcome

UNITS: Final = ("µs", "ms", "s")
FONT: Final = "system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif"
TITLE: Final = "32 callers in 4 processes want one lock"
WIDTH, ROW, TOP, BAR = 840, 38, 78, 14  # pixels
NAMES, WAITS, RATES = 16, 230, 540  # where each column begins
LONGEST = 190  # pixels of the longest bar of a column
LITTLE = 0.005  # of an equal share: what is less rounds to nothing


@dataclass(frozen=True)
class Theme:
    ink: str
    muted: str
    ours: str
    peer: str
    line: str  # of a scale
    page: str  # about that of the page behind the picture, which is transparent


THEMES: Final = {
    "light": Theme(ink="#1f2328", muted="#59636e", ours="#1a7f37", peer="#afb8c1", line="#d8dee4", page="#ffffff"),
    "dark": Theme(ink="#f0f6fc", muted="#9198a1", ours="#3fb950", peer="#57606a", line="#2b3138", page="#0d1117"),
}


@dataclass(frozen=True)
class Line:
    """A contender of the picture."""

    name: str
    longest: float  # milliseconds
    rate: float  # sections a second
    starves: str  # what it does to the caller that it serves least; "" if it starves nobody


def rounded(value: float) -> str:
    """Two digits: a sentence needs no more, and runs differ in the third."""
    value += value * 1e-9  # or a half would go to the even digit
    if value >= 10:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def time(value: float, unit: str) -> str:
    """A time in the unit that reads best."""
    at = UNITS.index(unit)
    while float(f"{value:.2g}") >= 1000 and at < len(UNITS) - 1:
        value, at = value / 1000, at + 1
    while value < 1 and at:
        value, at = value * 1000, at - 1
    return f"{rounded(value)} {UNITS[at]}"


def least(share: float) -> str:
    """What the caller gets that is served least, of an equal share."""
    return f"{share:.0%} of its share" if share >= LITTLE else "nothing"


def lines_of(outcomes: Sequence[Outcome]) -> list[Line]:
    """All contenders of `contended`, and ours of `fair`: ours first, then by their longest wait."""
    contended, fair = (next(each for each in outcomes if each.row == row) for row in ("contended", "fair"))
    of = dict.fromkeys(contended.samples, contended) | {FAIR: fair}
    lines = []
    for name, outcome in of.items():
        tail = outcome.tail(name)
        assert tail is not None
        starves = f"one caller gets {least(outcome.starving[name])}" if name in outcome.starving else ""
        lines.append(Line(name, tail[2], outcome.median(name), starves))
    return sorted(lines, key=lambda line: (line.name not in {OURS, FAIR}, line.name != OURS, line.longest))


def files(outcomes: Sequence[Outcome]) -> dict[Path, str]:
    """The pictures: where each stands, and its text."""
    lines = lines_of(outcomes)
    return {ROOT / "docs" / f"waits-{name}.svg": _svg(lines, theme) for name, theme in THEMES.items()}


def markup(outcomes: Sequence[Outcome]) -> str:
    """The lines of a page that show the picture, with a text for those who do not see it."""
    said = "; ".join(f"{line.name} {time(line.longest, 'ms')}" for line in lines_of(outcomes))
    return image("docs", "waits", f"{TITLE}. The longest wait: {said}")


def image(way: str, name: str, words: str) -> str:
    """The line of a page that shows a picture in light or dark, or these words. `way`: from the page to its folder."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{way}/{name}-dark.svg">'
        f'<img src="{way}/{name}-light.svg" alt="{escape(words)}"></picture>'
    )


def document(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    """The text of a picture: its lines within a head and an end."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"])


def _svg(lines: Sequence[Line], theme: Theme) -> str:
    longest, most = max(line.longest for line in lines), max(line.rate for line in lines)
    parts = [
        text(NAMES, 26, TITLE, theme.ink, size=17, bold=True),
        text(WAITS, 58, "longest wait (shorter is better)", theme.muted),
        text(RATES, 58, "critical sections a second (more is better)", theme.muted),
    ]
    for i, line in enumerate(lines):
        y, is_ours = TOP + ROW * i, line.name in {OURS, FAIR}
        parts.append(text(NAMES, y + 12, line.name, theme.ink, bold=is_ours))
        if line.starves:
            parts.append(text(NAMES, y + 26, line.starves, theme.muted, size=11))
        for x, share, label in (
            (WAITS, line.longest / longest, time(line.longest, "ms")),
            (RATES, line.rate / most, rounded(line.rate)),
        ):
            width = round(max(2.0, LONGEST * share), 1)
            colour = theme.ours if is_ours else theme.peer
            parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{BAR}" rx="2" fill="{colour}"/>')
            parts.append(text(x + width + 8, y + 12, label, theme.ink, bold=is_ours))
    return document(TITLE, WIDTH, TOP + ROW * len(lines), parts)


def text(x: float, y: float, words: str, colour: str, *, size: int = 13, bold: bool = False, anchor: str = "") -> str:
    """Words that begin at x, on the line y."""
    more = (' font-weight="600"' if bold else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(words)}</text>'
