"""The site: its navigation, its diagrams, its words. That it builds without a warning, `scripts/docs` holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))

import diagrams  # noqa: E402
import navigation  # noqa: E402

INDEX = ROOT / "docs" / "index.md"


def test_the_navigation_has_four_parts_and_apart_from_them_the_code():
    parts = [heading.partition(":")[0] for heading, _ in navigation.parts(INDEX)]
    assert [*dict.fromkeys(parts)] == ["Tutorial", "How-to", "Reference", "Understand", "Building on interlock"]


def test_each_page_stands_in_the_navigation_once():
    pages = [(INDEX.parent / path).resolve() for _, pages in navigation.parts(INDEX) for _, path in pages]
    assert len(pages) == len({*pages})
    folders = {page.parent for page in pages if page.name in {"README.md", "index.md"} and page.parent != ROOT}
    assert {page for page in (ROOT / "docs").rglob("*.md") if page.parent not in folders} - {*pages} == {INDEX}


WORDS = 46_000
# Neither code, nor what only a program reads: marks of figures, addresses of links, lines of tables.
NOT_READ = re.compile(r"<!--.*?-->|```.*?```|(?<=\])\([^)]*\)|^\|[-| ]+\|$|\|", re.DOTALL | re.MULTILINE)


def test_the_pages_for_users_have_a_bounded_number_of_words():
    pages = {
        (INDEX.parent / path).resolve()
        for heading, pages in navigation.parts(INDEX)
        if not heading.startswith("Building on interlock")
        for _, path in pages
    }
    words = {
        str(page.relative_to(ROOT)): len(NOT_READ.sub(" ", page.read_text()).split())
        for page in {INDEX, *pages} - {ROOT / "CHANGELOG.md", ROOT / "README.zh.md"}
    }
    most = sorted(words.items(), key=lambda each: -each[1])[:5]
    assert sum(words.values()) <= WORDS, f"say it shorter, or on one page only; the longest pages: {most}"


DRAWN = [
    pytest.param(source, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for number, source in enumerate(diagrams.BLOCK.findall(page.read_text()), 1)
]


@pytest.mark.parametrize("source", DRAWN)
def test_a_diagram_is_drawn_with_all_its_words_within_its_size(source):
    drawn = diagrams.svg(source, "")
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', drawn).groups())
    words = " ".join(re.findall(r"<text[^>]*>([^<]*)<", drawn))
    for said in re.findall(r": ([^\n]+)", source):
        assert all(word in words for word in re.sub(r"<br/>", " ", said).split() if word.isalnum()), said
    for x, y in re.findall(r'[ M]x?="?(\d+\.\d) "?y?="?(\d+\.\d)', drawn):
        assert 0 <= float(x) <= width, drawn
        assert 0 <= float(y) <= height, drawn


def test_a_diagram_has_the_name_of_its_section_for_those_who_hear_the_page():
    page = "## Who waits\n\n### A & B\n\n```mermaid\nflowchart LR\nA[one] -->|yes| B[two]\n```\n"
    assert 'role="img" aria-label="Diagram: A &amp; B"' in diagrams.drawn(page)


def test_a_diagram_that_this_cannot_draw_is_refused():
    for unknown in (
        "gantt\n",
        "sequenceDiagram\nparticipant A\nA=>B: x",
        "stateDiagram-v2\nA <-- B",
        "flowchart LR\nA ==> B",
    ):
        with pytest.raises(ValueError, match=r"draws no|has"):
            diagrams.svg(unknown, "")


# README.md and README.zh.md


def links(text):
    """Where its links lead, the sentences of either language in their own order."""
    return sorted(re.findall(r"\]\(([^)]+)\)", text))


def test_the_chinese_readme_says_what_the_english_one_says():
    """The same code, the same figures, the same headings in number, and links to the same pages."""
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    for what in (r"^```\w+\n.*?^```$", r"<!--=.*?<!--/-->", r"srcset=\"[^\"]+\"", r"^#+ ", r"^- ", r"^\|"):
        one, other = (re.findall(what, text, re.MULTILINE | re.DOTALL) for text in (english, chinese))
        assert one == other, what
    assert links(english.replace("(README.zh.md)", "")) == links(chinese.replace("(README.md)", ""))
