"""The command line: `scripts/plants`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from plants import nets, table
from plants.matrix import PLANTS
from plants.nets import LIMIT, Finding, Net, WentWrongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plants.plant import Plant

ABOUT = f"""\
Plant bugs in copies of interlock, one after the other, and let the nets of the suite search each copy: the random walks
of the scripts, the simulator, the exhaustive search, the random histories, directed tests. A net that does not find a
bug which it must find within {LIMIT:.0f} s has missed it.
"""
EXAMPLES = """\
examples:
  scripts/plants                              all plants: about ten minutes on two cores
  scripts/plants --only quarantine --jobs 1   the plants with this text in their name
  scripts/plants --net simulator              one net
  scripts/plants --missing                    only what no run has judged yet, and what was missed
  scripts/plants --write                      then write the table into docs/testing.md
  scripts/plants --list                       what is planted, and which nets must catch it

exit status: 0 each net caught what it must, 1 one has missed a plant, 2 wrong usage, 3 a net could not judge
docs/testing.md tells more. The results of all runs are kept in .plants.json.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "scripts/plants", description=ABOUT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", metavar="TEXT", default="", help="only plants with this text in their name")
    made.add_argument("--net", metavar="TEXT", default="", help="only nets with this text in their name")
    made.add_argument("--missing", action="store_true", help="only what was missed, or has not been judged yet")
    made.add_argument(
        "--jobs", type=int, metavar="N", default=os.cpu_count() or 1, help="so many at a time (one a core)"
    )
    made.add_argument("--write", action="store_true", help="write the table into docs/testing.md")
    made.add_argument("--list", action="store_true", help="say what is planted, and search nothing")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the bugs that the arguments choose, and let their nets search. Returns the exit status."""
    said, results = parser().parse_args(arguments), table.load()
    work = [
        (plant, net)
        for plant in PLANTS.values()
        for net in plant.nets
        if said.only in plant.name and said.net in net.title
        and not (said.missing and results.get(table.key(plant.name, net), {}).get("caught"))
    ]  # fmt: skip
    if said.list:
        for plant, net in work:
            print(f"{net.title:18} {plant.name}")
        return 0
    if not work and not said.write:
        print("scripts/plants: no plant and net has these texts in its name", file=sys.stderr)
        return 2
    status, began = 0, time.monotonic()
    with ThreadPoolExecutor(said.jobs) as pool:
        searches = {pool.submit(_searched, plant, net): (plant, net) for plant, net in work}
        try:
            for number, search in enumerate(as_completed(searches), 1):
                plant, net = searches[search]
                try:
                    found = search.result()
                except WentWrongError as wrong:
                    print(
                        f"[{number}/{len(work)}] {plant.name} ({net.title}): it could not judge:\n{wrong}", flush=True
                    )
                    status = 3
                    continue
                results[table.key(plant.name, net)] = found._asdict()
                table.save(results)
                verdict = "caught" if found.caught else "MISSED"
                how = f"{verdict} after {found.seconds:.0f} s by {net.title}"
                print(f"[{number}/{len(work)}] {how}: {plant.name} ({found.by})", flush=True)
                status = status or int(not found.caught)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            nets.stop()
            print("stopped; what was found so far is kept", file=sys.stderr)
            return 130
    missed = sum(not results.get(table.key(plant.name, net), {}).get("caught") for plant, net in work)
    print(f"{len(work)} searches, {missed} missed or not judged, {time.monotonic() - began:.0f} s")
    if said.write:
        table.write(results)
    return status


def _searched(plant: Plant, net: Net) -> Finding:
    with tempfile.TemporaryDirectory(prefix="interlock-plant-") as directory:
        return net.search(plant.plant(Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
