"""`interlock wait`: ends when a name is free, without acquiring it."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer
from rich.cells import chop_cells

from interlock._protocol.names import duration
from interlock.cli.exit_status import EX_TEMPFAIL
from interlock.cli.lookup import View, glance, with_places
from interlock.cli.options import AsJson, Name, Prefix, Urls, connect
from interlock.cli.output import print_json, safe, span
from interlock.cli.show import describe_party
from interlock.errors import ConfigError
from interlock.primitives.kinds import kind_named

if TYPE_CHECKING:
    from interlock.threads import Interlock

__all__ = ["Progress", "app", "short"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
FIRST_PAUSE: Final = 0.05  # seconds between two looks
LONGEST_PAUSE: Final = 0.5
ASK_PLACE_INTERVAL: Final = 2.0  # seconds, as a process reports where it holds

EPILOG = """\b
interlock wait stock:42                   until nobody holds it
interlock wait stock:42 -w 30 || echo "still held"

It looks twice a second, and acquires nothing: when it ends, somebody else may take the name at once. To do something
while nobody else does, use `interlock run NAME -- command`. A semaphore is free if a permit is, a latch if it is open,
a once() if none is running.

Exit status: 0 when it is free, 75 if it is not after -w seconds, 64 for a bad name or option, 69 if no server
answers."""


@app.command("wait", epilog=EPILOG)
def wait(
    name: Name,
    *,
    within: Annotated[
        float | None, typer.Option("-w", "--wait", metavar="SECONDS", help="Wait so long at most. Default: for ever.")
    ] = None,
    url: Urls = None,
    prefix: Prefix = "lock:",
    as_json: AsJson = False,
) -> int:
    """Wait until nobody holds a name, without acquiring it."""
    limit = float("inf") if within is None else duration(within, "--wait")
    began = time.monotonic()
    with connect(url, prefix, "interlock wait") as locks, Progress() as progress:
        view = until_free(locks, name, began + limit, progress)
    waited = time.monotonic() - began
    if as_json:
        print_json({"name": name, "kind": view.kind, "free": not view.is_busy, "waited": round(waited, 3)})
    elif view.is_busy:
        print(f"interlock: {safe(name)} is not free after {span(waited)}: {short(view)}", file=sys.stderr)
    return EX_TEMPFAIL if view.is_busy else 0


def until_free(locks: Interlock, name: str, limit: float, progress: Progress) -> View:
    """Look at a name until it is free, or until this time of time.monotonic(). Returns the last view."""
    pause, began = FIRST_PAUSE, time.monotonic()
    place = Place(locks)
    while True:
        view = glance(locks, name, 1)
        if view.kind is not None and not (view.is_known and kind_named(view.kind).becomes_free):
            raise ConfigError(
                f"the key {view.key!r} is that of {view.kind}: nobody can hold it, so there is nothing to wait for"
            )
        left = limit - time.monotonic()
        if not view.is_busy or left <= 0:
            return with_places(locks, view)
        if progress.is_on:
            progress.show(f"waiting for {span(time.monotonic() - began)}: {short(place.added_to(view))}")
        time.sleep(max(0.001, min(pause, left)))
        pause = min(LONGEST_PAUSE, pause * 1.5)


class Place:
    """Where the first holder acquired a name: asked when it has changed, and again while its process may not have said.

    The registry costs the server more than a look at the name.
    """

    def __init__(self, locks: Interlock) -> None:
        self.locks = locks
        self.token: str | None = None
        self.place: str | None = None
        self.ask_again_at = 0.0

    def added_to(self, view: View) -> View:
        """The view with the place of its first holder."""
        if not view.holders:
            return view
        first = view.holders[0]
        if first.token != self.token or (self.place is None and time.monotonic() >= self.ask_again_at):
            self.token, self.place = first.token, with_places(self.locks, view).holders[0].place
            self.ask_again_at = time.monotonic() + ASK_PLACE_INTERVAL
        return replace(view, holders=[replace(first, place=self.place), *view.holders[1:]])


def short(view: View) -> str:
    """Why somebody who asks now must wait, on one line."""
    if view.quarantine is not None:
        return f"in quarantine for {span(view.quarantine)} more"
    if view.state == "counting":
        return f"{view.left} of {view.count} have yet to count down"
    if not view.holders:
        return view.state
    first, *rest = view.holders
    since = f" for {span(first.since)}" if first.since is not None else ""
    place = f" at {first.place}" if first.place else ""
    others = f", and {view.holding - 1} others" if rest or view.holding > 1 else ""
    return f"held by {safe(describe_party(first)[0])}{since}{safe(place)}{others}"


class Progress:
    """One line on the terminal that says what goes on; nothing elsewhere."""

    def __init__(self) -> None:
        self.is_on = sys.stderr.isatty()
        self.has_shown = False

    def show(self, text: str) -> None:
        """Show this in place of what was shown before."""
        if self.is_on:
            self.has_shown = True
            columns = max(20, shutil.get_terminal_size().columns - 1)
            print(f"\r\x1b[K{chop_cells(text, columns)[0]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove what was shown."""
        if self.has_shown:
            self.has_shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
