"""The site of the pages, which `scripts/docs` builds: no page is wider than its window, and no picture is missing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from harness.browser import Browser
from harness.matrix import required

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="no server: a page from the disk")
SITE = Path(__file__).parents[2] / ".site" / "html"
LOOKS = {"light-wide": (False, (1400, 900)), "dark-narrow": (True, (390, 800))}
FAULTS = """
const found = [], root = document.documentElement;
if (root.scrollWidth > innerWidth) found.push(`${root.scrollWidth} px wide, in a window of ${innerWidth}`);
for (const each of document.images)
    if (each.offsetParent && each.complete && !each.naturalWidth) found.push(`no picture ${each.src}`);
return found;
"""


@pytest.fixture(scope="module", params=LOOKS, ids=str)
def reader(request):
    """A browser in which somebody reads the site."""
    dark, size = LOOKS[request.param]
    with contextlib.closing(Browser(dark=dark, size=size, touch=size[0] < 600)) as made:
        yield made


@pytest.fixture(scope="module")
def pages():
    """Every page but the single decisions, each with the name that its address has."""
    if not SITE.exists():
        required("the site; scripts/docs builds it")
    found = {str(page.relative_to(SITE).with_suffix("")): page for page in sorted(SITE.rglob("*.html"))}
    return {name: page for name, page in found.items() if "/adr/0" not in name and not name.startswith("_")}


def test_no_page_is_wider_than_its_window_and_no_picture_is_missing(reader, pages):
    faults = {}
    for name, page in pages.items():
        reader.open(page.as_uri())
        if found := reader.run(FAULTS):
            faults[name] = found
    assert len(pages) > 50
    assert not faults
