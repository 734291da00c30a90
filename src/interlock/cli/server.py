"""`interlock server`: starts, stops and describes the embedded server that this user's processes share."""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from interlock import embedded
from interlock.cli.escape import safe
from interlock.cli.exit_status import EX_TEMPFAIL
from interlock.cli.options import AsJson  # noqa: TC001 (typer reads the annotations)
from interlock.cli.output import print_json

__all__ = ["app"]

NOT_RUNNING = 3  # the exit status of init scripts for `status`

app = typer.Typer(rich_markup_mode=None, add_completion=False)


EPILOG = """\b
interlock server start        prints its URL; programs connect to embedded://
interlock server status --json | jq -r .url
interlock server stop         not while a process holds a lease

Exit status: 0; `status`: 3 if it does not run; `stop`: 75 if leases are held; 64 for a bad option or if the extra
`embedded` is not installed, 69 if it does not start or answer."""


@app.callback(invoke_without_command=True, epilog=EPILOG)
def server(context: typer.Context) -> None:
    """Start, stop or describe the embedded Valkey that `embedded://` connects this user's processes to."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def start(*, as_json: AsJson = False) -> None:
    """Start the server, unless it runs, and print its URL. The server runs on when this command ends."""
    url = embedded.shared_url()
    if as_json:
        print_json(_as_json(embedded.shared_status()))
    else:
        print(url)


@app.command()
def status(*, as_json: AsJson = False) -> int:
    """Print the server's URL, process id, version and uptime. Exit status 0 if it runs, 3 if not."""
    running = embedded.shared_status()
    if as_json:
        print_json(_as_json(running))
        return NOT_RUNNING if running is None else 0
    if running is None:
        print("not running; `interlock server start` starts it")
        return NOT_RUNNING
    uptime = dt.timedelta(seconds=round(running.uptime))
    print(f"{running.url}  pid {running.pid}  Valkey {running.version}  up {uptime}")
    return 0


@app.command(short_help="Stop the server, unless clients hold leases in it.")
def stop(
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Stop the server even while clients hold leases in it.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Stop the server, unless clients hold leases in it: then print the holders. Exit status 0 if stopped, 75 if not.

    --force stops the server in any case. Holders rely on their leases until these expire, so the next server grants
    nothing for max_ttl (30 s): the quarantine, as after a crash. The server also loses what `once` has recorded.
    """
    try:
        stopped = embedded.stop_shared(force=force)
    except embedded.LeasesHeld as held:
        print(f"interlock: {safe(held)} (--force)", file=sys.stderr)
        return EX_TEMPFAIL
    if as_json:
        print_json({"stopped": stopped})
    else:
        print("stopped" if stopped else "not running")
    return 0


def _as_json(running: embedded.Status | None) -> dict[str, Any]:
    return {"running": running is not None, **(asdict(running) if running else {})}
