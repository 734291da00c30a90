"""Makes docs/top.svg, the picture of `interlock top`: `PYTHONPATH=tests:tests/unit python -m harness.pictures`."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

TOP = Path(__file__).parents[2] / "docs" / "top.svg"
COLUMNS = 100


def svg(lines: Sequence[Text]) -> str:
    """These lines as a terminal shows them."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", force_terminal=True, highlight=False
    )
    console.print(Text("\n").join(lines), soft_wrap=True)
    return console.export_svg(title="interlock top", unique_id="interlock-top")


def words_of(picture: str) -> list[str]:
    """The words in a picture, in order: these are the same whichever version of rich has drawn it."""
    texts = re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)
    return " ".join(html.unescape(text).replace("\xa0", " ") for text in texts).split()


if __name__ == "__main__":
    from test_top_view import picture_lines

    TOP.write_text(svg(picture_lines()))
