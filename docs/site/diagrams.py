"""Draws the diagrams of the pages as SVG, without a network: what they need of Mermaid's language, and no more.

A page says a diagram in Mermaid's words, which GitHub and editors draw; the site draws it here, in the colours of its
theme (`static/site.css`). Three kinds:

- `sequenceDiagram`: participants side by side, time runs down.
- `stateDiagram-v2`: states in a row, in the order in which the text names them; transitions to the right run above
  them, those to the left below, each in a lane that no other label is in.
- `flowchart LR`: a tree of decisions from left to right.

A word that is not known here raises ValueError, and the build ends.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from html import escape
from typing import Final

HEADING: Final = re.compile(r"^##+ (.*)$", re.MULTILINE)  # one # is a comment in code
BLOCK: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHARACTER, LINE = 6.9, 17  # pixels of a letter and of a line, at 13 pixels
MARGIN = 12
SMALLEST = 600  # pixels: a narrower page scrolls a diagram sideways rather than make its words smaller


def drawn(text: str) -> str:
    """The text of a page with its diagrams drawn, each as a block of raw HTML."""

    def block(found: re.Match[str]) -> str:
        *_, heading = ["", *HEADING.findall(text, 0, found.start())]
        return f"```{{raw}} html\n{svg(found[1], heading)}\n```"

    return BLOCK.sub(block, text)


def svg(source: str, name: str) -> str:
    """One diagram. Who hears the page instead of seeing it hears the name."""
    first, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    kinds = {"sequenceDiagram": _sequence, "stateDiagram-v2": _states, "flowchart LR": _tree}
    if first not in kinds:
        raise ValueError(f"this draws no {first!r}, only {', '.join(kinds)}")
    return kinds[first](lines).replace(' role="img"', f' role="img" aria-label="Diagram: {escape(name)}"', 1)


def _width(words: str) -> float:
    return CHARACTER * len(words)


def _rows(label: str) -> list[str]:
    return [part.strip() for part in label.split("<br/>")]


def _words(x: float, y: float, rows: list[str], kind: str = "", anchor: str = "middle") -> str:
    """Lines of text around the height y."""
    top = y - LINE * (len(rows) - 1) / 2 + 4.5
    return "".join(
        f'<text x="{x:.1f}" y="{top + LINE * i:.1f}" text-anchor="{anchor}" class="{kind}">{escape(row)}</text>'
        for i, row in enumerate(rows)
    )


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5" class="{kind}"/>'


def _path(points: list[tuple[float, float]], kind: str) -> str:
    line = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{line}" class="{kind}"/>'


def _head(x: float, y: float, dx: int, dy: int, kind: str = "head") -> str:
    """The head of an arrow that ends at (x, y), where it came in the direction (dx, dy)."""
    back, side = 8, 4
    one = (x - back * dx - side * dy, y - back * dy - side * dx)
    other = (x - back * dx + side * dy, y - back * dy + side * dx)
    return _path([one, (x, y), other], kind)


def _whole(width: float, height: float, parts: list[str]) -> str:
    size = f'width="{width:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" style="min-width: {min(width, SMALLEST):.0f}px"'
    return f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n' + (
        "\n".join(parts) + "\n</svg></div>"
    )


# Sequences

MESSAGE: Final = re.compile(r"(\w+)\s*(--?>>|--\)|-x)\s*(\w+): (.*)")
NOTE: Final = re.compile(r"Note over (\w+)(?:,\s*(\w+))?: (.*)")
STEP, BOX = 40, 44  # pixels from message to message; the height of a participant


@dataclass
class Sequence:
    """What is drawn so far: where each participant stands, and how far down time has come."""

    at: dict[str, float]
    width: float
    y: float = BOX + MARGIN + 22
    parts: list[str] = field(default_factory=list)
    frames: list[tuple[float, str]] = field(default_factory=list)

    def message(self, source: str, arrow: str, target: str, words: str) -> None:
        """An arrow with its words."""
        x, to = self.at[source], self.at[target]
        kind = "line dashed" if arrow.startswith("--") else "line"
        if source == target:
            self.parts += [
                _path([(x, self.y - 6), (x + 30, self.y - 6), (x + 30, self.y + 10), (x, self.y + 10)], kind),
                _head(x, self.y + 10, -1, 0), _words(x + 38, self.y + 1, [words], "", "start"),
            ]  # fmt: skip
        else:
            way = 1 if to > x else -1
            end = to - 26 * way if arrow == "-x" else to
            self.parts += [_path([(x, self.y + 6), (end, self.y + 6)], kind), _words((x + to) / 2, self.y - 6, [words])]
            if arrow == "-x":
                self.parts += [_path([(end - 5, self.y + 1), (end + 5, self.y + 11)], "line bad"),
                               _path([(end - 5, self.y + 11), (end + 5, self.y + 1)], "line bad")]  # fmt: skip
            else:
                self.parts.append(_head(end, self.y + 6, way, 0))
        self.y += STEP

    def note(self, one: str, other: str | None, words: str) -> None:
        """A box over one participant, or over two."""
        rows = _rows(words)
        left, right = sorted((self.at[one], self.at[other or one]))
        half = max(max(map(_width, rows)) / 2 + 10, (right - left) / 2 + 20)
        height = LINE * len(rows) + 10
        middle = min(max((left + right) / 2, half + 2), self.width - half - 2)
        self.parts += [_box(middle - half, self.y - 14, 2 * half, height, "note"),
                       _words(middle, self.y - 14 + height / 2, rows)]  # fmt: skip
        self.y += height + 16

    def begin(self, words: str) -> None:
        """A frame begins here."""
        self.parts.append(_words(MARGIN + 6, self.y - 4, [words], "muted", "start"))
        self.frames.append((self.y - 18, words))
        self.y += 24

    def end(self) -> None:
        """The innermost frame ends here."""
        top, _ = self.frames.pop()
        self.parts.append(_box(2, top, self.width - 4, self.y - top - 8, "frame"))
        self.y += 14


def _sequence(lines: list[str]) -> str:
    names: dict[str, list[str]] = {}
    steps = []
    for line in lines:
        if found := re.match(r"participant (\w+)(?: as (.+))?$", line):
            names[found[1]] = _rows(found[2] or found[1])
        else:
            steps.append(line)
    at = _columns(names, [found for line in steps if (found := MESSAGE.match(line))])
    last = [*at][-1]
    selves = [_width(m[4]) + 50 for m in map(MESSAGE.match, steps) if m and m[1] == m[3] == last]
    notes = [max(map(_width, _rows(n[3]))) / 2 + 16 for n in map(NOTE.match, steps) if n and (n[2] or n[1]) == last]
    width = at[last] + max([_half(names[last]) + MARGIN, *selves, *notes])
    drawing = Sequence(at, width)
    for line in steps:
        if found := MESSAGE.match(line):
            drawing.message(*found.groups())
        elif found := NOTE.match(line):
            drawing.note(*found.groups())
        elif line.startswith(("loop ", "opt ")):
            drawing.begin(line)
        elif line == "end":
            drawing.end()
        else:
            raise ValueError(f"no sequence has {line!r}")
    height = drawing.y
    lifelines = [_path([(x, BOX + MARGIN), (x, height - 6)], "lifeline") for x in at.values()]
    heads = [
        _box(x - _half(names[name]), MARGIN / 2, 2 * _half(names[name]), BOX, "box")
        + _words(x, MARGIN / 2 + BOX / 2, names[name])
        for name, x in at.items()
    ]
    return _whole(width, height, [*lifelines, *heads, *drawing.parts])


def _half(rows: list[str]) -> float:
    return max(map(_width, rows)) / 2 + 10


def _columns(names: dict[str, list[str]], messages: list[re.Match[str]]) -> dict[str, float]:
    """Where each participant stands: so far apart that boxes and words find room."""
    order = [*names]
    at = {order[0]: _half(names[order[0]]) + MARGIN}
    for i, name in enumerate(order[1:], 1):
        at[name] = at[order[i - 1]] + _half(names[order[i - 1]]) + _half(names[name]) + 14
        for found in messages:
            first, last = sorted((order.index(found[1]), order.index(found[3])))
            if last == i and first < i:
                at[name] = max(at[name], at[order[first]] + _width(found[4]) + 28)
            elif first == last == i - 1:
                at[name] = max(at[name], at[order[first]] + _width(found[4]) + 52)
    return at


# States

TRANSITION: Final = re.compile(r"(\w+|\[\*\]) --> (\w+|\[\*\])(?:: (.*))?$")
LANE, GAP = 26, 64  # pixels from lane to lane; between two states


def _states(lines: list[str]) -> str:
    labels: dict[str, list[str]] = {}
    moves: list[tuple[str, str, str]] = []
    for line in lines:
        if found := TRANSITION.match(line):
            moves.append(
                (found[1] if found[1] != "[*]" else "(", found[2] if found[2] != "[*]" else ")", found[3] or "")
            )
        elif found := re.match(r"(\w+): (.*)$", line):
            labels[found[1]] = textwrap.wrap(found[2], 18)
        else:
            raise ValueError(f"no state diagram has {line!r}")
    order = [end for end in "(" if any(move[0] == end for move in moves)]
    order += labels
    order += [end for end in ")" if any(move[1] == end for move in moves)]
    half = {name: 7.0 if name in "()" else max(_half(labels[name]), 60) for name in order}
    x, at = MARGIN, {}
    for name in order:
        at[name] = x + half[name]
        x = at[name] + half[name] + GAP
    lanes = _lanes(order, at, moves)
    high = LINE * max(len(rows) for rows in labels.values()) + 16
    above = 1 + max([lane for lane in lanes if lane >= 0], default=-1)
    below = -min([lane for lane in lanes if lane < 0], default=0)
    top = MARGIN + LANE * above + 6
    parts = [_state(name, at[name], half[name], top, high, labels) for name in order]
    used: dict[tuple[str, bool], int] = {}
    ports = {
        side: sum((name, lane >= 0) == side for move, lane in zip(moves, lanes, strict=True) for name in move[:2])
        for side in {(name, up) for name in order for up in (True, False)}
    }
    right, said = x - GAP + MARGIN, []
    for move, lane in sorted(zip(moves, lanes, strict=True), key=lambda pair: abs(pair[1] + 0.5)):
        up = lane >= 0
        edge, way = (top, 1) if up else (top + high, -1)
        y = top - 10 - LANE * lane if up else top + high + 10 - LANE * (lane + 1)
        ends = []
        for name in move[:2]:
            used[name, up] = number = used.get((name, up), 0) + 1
            ends.append(at[name] + half[name] * 0.8 * (2 * number / (ports[name, up] + 1) - 1))
        parts += [
            _path([(ends[0], edge), (ends[0], y), (ends[1], y), (ends[1], edge)], "line"),
            _head(ends[1], edge, 0, way),
        ]
        middle = max(sum(ends) / 2, _width(move[2]) / 2 + MARGIN)
        right = max(right, middle + _width(move[2]) / 2 + MARGIN)
        if move[2]:
            said += [_words(middle, y - 7, [move[2]], "halo"), _words(middle, y - 7, [move[2]])]
    return _whole(right, top + high + LANE * below + MARGIN + 6, parts + said)


def _state(name: str, x: float, half: float, top: float, high: float, labels: dict[str, list[str]]) -> str:
    if name in "()":
        ring = f'<circle cx="{x:.1f}" cy="{top + high / 2:.1f}" r="7" class="{"dot" if name == "(" else "ring"}"/>'
        return ring + "".join(
            _path([(x, y), (x, top + high / 2 + d)], "lifeline") for y, d in ((top, -7), (top + high, 7))
        )
    return _box(x - half, top, 2 * half, high, "box") + _words(x, top + high / 2, labels[name])


def _lanes(order: list[str], at: dict[str, float], moves: list[tuple[str, str, str]]) -> list[int]:
    """For each transition its lane: 0 and up above the states, -1 and down below; the shortest ones nearest."""
    taken: dict[int, list[tuple[float, float]]] = {}
    lanes = dict.fromkeys(range(len(moves)), 0)
    for number in sorted(lanes, key=lambda i: abs(order.index(moves[i][0]) - order.index(moves[i][1]))):
        source, target, words = moves[number]
        left, right = sorted((at[source], at[target]))
        reach = max(right - left + 60, _width(words) + 16) / 2
        span = ((left + right) / 2 - reach, (left + right) / 2 + reach)
        step, lane = (1, 0) if order.index(source) <= order.index(target) else (-1, -1)
        while any(span[0] < other[1] and other[0] < span[1] for other in taken.get(lane, [])):
            lane += step
        taken.setdefault(lane, []).append(span)
        lanes[number] = lane
    return [lanes[i] for i in range(len(moves))]


# Trees

NODE: Final = r"(\w+)(?:\[\"?([^\"\]]+)\"?\]|\{\"?([^\"}]+)\"?\})?"
EDGE: Final = re.compile(rf"{NODE}(?:\s*-->\s*(?:\|([^|]+)\|)?\s*{NODE})?$")


def _tree(lines: list[str]) -> str:
    labels: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    children: dict[str, list[tuple[str, str]]] = {}
    for line in lines:
        found = EDGE.match(line)
        if not found:
            raise ValueError(f"no tree has {line!r}")
        for name, box, question in (found.group(1, 2, 3), found.group(5, 6, 7)):
            if box or question:
                labels[name] = _rows(box or question)
                kinds[name] = "box" if box else "question"
        if found[5]:
            children.setdefault(found[1], []).append((found[5], found[4] or ""))
    root = next(iter(labels))
    depth, y = {root: 0}, {}
    _place(root, children, labels, depth, y)
    widths = [
        2 * max(_half(labels[name]) for name in labels if depth[name] == level)
        for level in range(max(depth.values()) + 1)
    ]
    gaps = [
        30
        + max(
            [_width(word) for name in labels if depth[name] == level for _, word in children.get(name, [])], default=0
        )
        for level in range(len(widths))
    ]
    x = [MARGIN + sum(widths[:level]) + sum(gaps[:level]) for level in range(len(widths))]
    parts = []
    for name, rows in labels.items():
        left, high = x[depth[name]], LINE * len(rows) + 14
        parts += [_box(left, y[name] - high / 2, widths[depth[name]], high, kinds[name]),
                  _words(left + widths[depth[name]] / 2, y[name], rows)]  # fmt: skip
        for child, words in children.get(name, []):
            begin, end = left + widths[depth[name]], x[depth[child]]
            bend = begin + 10
            parts += [_path([(begin, y[name]), (bend, y[name]), (bend, y[child]), (end, y[child])], "line"),
                      _head(end, y[child], 1, 0), _words(bend + 6, y[child] - 9, [words], "muted", "start"),
            ]  # fmt: skip
    height = max(y.values()) + LINE * 2 + MARGIN
    return _whole(x[-1] + widths[-1] + MARGIN, height, parts)


def _place(
    name: str,
    children: dict[str, list[tuple[str, str]]],
    labels: dict[str, list[str]],
    depth: dict[str, int],
    y: dict[str, float],
) -> None:
    """Leaves one below the other; what has children in the middle of them."""
    below = [child for child, _ in children.get(name, [])]
    for child in below:
        depth[child] = depth[name] + 1
        _place(child, children, labels, depth, y)
    if below:
        y[name] = (y[below[0]] + y[below[-1]]) / 2
    else:
        lowest = max(y.values(), default=MARGIN)
        y[name] = lowest + LINE * (len(labels[name]) + 1) + 14
