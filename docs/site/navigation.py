"""The navigation of the site, read from `docs/index.md`: so there is one list of the pages, and it reads well as text.

A heading is a part, and the first link in each row of the tables below it names a page. A part with headings of its own
has one list for each: "How-to" and "Frameworks" become "How-to: frameworks".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROW: Final = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\) \|")
HEADING: Final = re.compile(r"^(##+) (.+)$")


def parts(index: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each part: its heading, and the title and the path of each of its pages, as links of the index say them."""
    part = heading = ""
    pages: list[tuple[str, str]] = []
    for line in [*index.read_text(encoding="utf-8").splitlines(), "## "]:
        if found := HEADING.match(line) or re.match(r"^(##) ()$", line):
            if pages:
                yield heading, pages
            pages = []
            if found[1] == "##":
                part = heading = found[2]
            else:
                heading = f"{part}: {found[2][0].lower()}{found[2][1:]}"
        elif row := ROW.match(line):
            pages.append((row[1].strip("`"), row[2]))


def toctrees(index: Path) -> str:
    """The same in the words of MyST."""
    blocks = []
    for heading, pages in parts(index):
        lines = [f"{title} <{path.removesuffix('.md')}>" for title, path in pages]
        blocks.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *lines, "```"]))
    return "\n\n" + "\n\n".join(blocks) + "\n"


def folder(page: Path, index: Path) -> str:
    """The other pages of the folder of which this page is the index, if the index of the site does not name them."""
    named = {(index.parent / path).resolve() for _, pages in parts(index) for _, path in pages}
    others = sorted(each.stem for each in page.parent.glob("*.md") if each != page and each.resolve() not in named)
    return "\n\n" + "\n".join(["```{toctree}", ":hidden:", "", *others, "```"]) + "\n" if others else ""
