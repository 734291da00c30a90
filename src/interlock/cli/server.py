"""`interlock server`: starts, stops and describes the embedded server that this user's processes share."""

from __future__ import annotations

import datetime as dt
import sys
from typing import Annotated

import typer

from interlock import embedded
from interlock.cli.exit_status import EX_TEMPFAIL

__all__ = ["app"]

NOT_RUNNING = 3  # the exit status of init scripts for `status`

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def server(context: typer.Context) -> None:
    """Start, stop or describe the embedded Valkey that `embedded://` connects this user's processes to."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def start() -> None:
    """Start the server, unless it runs, and print its URL. The server runs on when this command ends."""
    print(embedded.shared_url())


@app.command()
def status() -> int:
    """Print the server's URL, process id, version and uptime. Exit status 0 if it runs, 3 if not."""
    running = embedded.shared_status()
    if running is None:
        print("not running; `interlock server start` starts it")
        return NOT_RUNNING
    uptime = dt.timedelta(seconds=round(running.uptime))
    print(f"{running.url}  pid {running.pid}  Valkey {running.version}  up {uptime}")
    return 0


@app.command()
def stop(
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Stop the server even while clients hold leases in it.")
    ] = False,
) -> int:
    """Stop the server, unless clients hold leases in it: then print the holders. Exit status 0 if stopped, 75 if not.

    --force stops the server in any case. Holders rely on their leases until these expire, so the next server grants
    nothing for max_ttl (60 s): the quarantine, as after a crash. The server also loses what `once` has recorded.
    """
    try:
        print("stopped" if embedded.stop_shared(force=force) else "not running")
    except embedded.LeasesHeld as held:
        print(f"interlock: {held} (--force)", file=sys.stderr)
        return EX_TEMPFAIL
    return 0
