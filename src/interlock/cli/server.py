"""`interlock server`: the embedded server that `embedded://` shares among this user's processes."""

from __future__ import annotations

import datetime as dt
import sys
from typing import Annotated

import typer

from interlock import embedded
from interlock.cli.exit_status import EX_TEMPFAIL

__all__ = ["app"]

NOT_RUNNING = 3  # what init scripts answer to `status`

app = typer.Typer()


@app.callback(invoke_without_command=True)
def server(context: typer.Context) -> None:
    """Start, stop or describe this user's embedded Valkey, the one behind `embedded://`."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def start() -> None:
    """Start it, unless it runs, and print its URL. It goes on when this command ends."""
    print(embedded.shared_url())


@app.command()
def status() -> int:
    """Print its URL, process id, version and uptime. Exit status 0 if it runs, 3 if not."""
    found = embedded.shared_status()
    if found is None:
        print("not running; `interlock server start` starts it")
        return NOT_RUNNING
    uptime = dt.timedelta(seconds=round(found.uptime))
    print(f"{found.url}  pid {found.pid}  Valkey {found.version}  up {uptime}")
    return 0


@app.command()
def stop(
    *,
    force: Annotated[bool, typer.Option("--force", help="Stop it even while leases are held in it.")] = False,
) -> int:
    """Stop it, unless leases are held in it: then say who holds what. Exit status 0 if it is stopped now, 75 if not.

    With --force it is stopped in any case. Holders go on for the rest of their leases, so the next server grants
    nothing for max_ttl (60 s): the quarantine, as after a crash. What `once` remembers is gone.
    """
    try:
        print("stopped" if embedded.stop_shared(force=force) else "not running")
    except embedded.LeasesHeld as held:
        print(f"interlock: {held} (--force)", file=sys.stderr)
        return EX_TEMPFAIL
    return 0
