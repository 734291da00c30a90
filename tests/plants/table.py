"""The table of docs/testing.md: each plant, each net that must catch it, and what the net said."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from plants.matrix import COUNTING, FOUND, KNOWN
from plants.plant import PROJECT

if TYPE_CHECKING:
    from pathlib import Path

PAGE: Final = PROJECT / "docs" / "testing.md"
RESULTS: Final = PROJECT / ".plants.json"  # what each net said last of each plant, on this machine
BEGIN: Final = "<!-- plants: scripts/plants --write -->"
END: Final = "<!-- end of plants -->"

Results = dict[str, dict[str, Any]]


def load() -> Results:
    """Return what each net said last, by `key`."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(results: Results) -> None:
    """Keep what the nets said."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def markdown(results: Results) -> str:
    """The table. Raises KeyError if a net has not judged a plant yet."""
    lines = []
    groups = (
        ("faults that interlock had", FOUND),
        ("faults that a lock over Redis is known for", KNOWN),
        ("wrong rules of who counts in a quorum", COUNTING),
    )
    for title, plants in groups:
        lines += ["", f"| {title} | net | caught by | seconds |", "|---|---|---|---|"]
        for plant in plants:
            for number, net in enumerate(plant.nets):
                said = results[key(plant.name, net)]
                name = plant.name if number == 0 else ""
                by = said["by"].replace("|", "\\|") if said["caught"] else f"**missed**: {said['by']}"
                lines.append(f"| {name} | {net.title} | {by} | {said['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def key(plant: str, net: Any) -> str:
    """Return the name that one net of one plant has in the results."""
    return f"{plant} / {net}"


def write(results: Results, page: Path = PAGE) -> None:
    """Write the table into the page."""
    text = page.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{page} lacks the line {BEGIN!r} or {END!r}")
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n{markdown(results)}\n{END}", text))
