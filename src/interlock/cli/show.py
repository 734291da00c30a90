"""`interlock show`: who holds a name, who waits for it, and what else the server knows of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import difflib
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from interlock._people.motion import STUCK
from interlock.cli.exit_status import NOTHING_THERE
from interlock.cli.lookup import LISTED, MOST, Holder, Party, View, Waiter, look
from interlock.cli.options import TIME, AsJson, Name, Prefix, Urls, connect
from interlock.cli.output import callers, console, moves, print_json, print_rows, safe, shortened, span
from interlock.errors import LockError
from interlock.primitives.codes import OTHER
from interlock.primitives.registry import SILENT_AFTER
from interlock.primitives.view import HANDING_OVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from interlock.threads import Interlock

__all__ = ["app", "describe", "describe_party", "nothing_known"]

FIRST: Final = 10  # holders and waiters, for people
MOST_JSON: Final = 100  # the same, for programs
NEAR: Final = 5  # names that resemble one of which the server knows nothing
LIKE: Final = 0.7  # how much they resemble it, at least: 1 is equal
STYLES: Final = {
    HANDING_OVER: "yellow",
    "free": "green",
    "open": "green",
    "held": "yellow",
    "counting": "yellow",
    "waiting": "yellow",
}

app = typer.Typer(rich_markup_mode=None, add_completion=False)

EPILOG = """\b
interlock show stock:42              the server of $INTERLOCK_URL
interlock show stock:42 --all        every waiter, not the first ten
interlock show stock:42 --json | jq -r '.holders[].host'

A name is enough: interlock finds out which synchronizer uses it, or that it is the plain key of another library. The
run of a once() for a key has the name NAME:key=KEY.

Exit status: 0, 1 if the server has nothing under this name, 64 for a bad name or option, 69 if no server answers. It
changes nothing."""


@app.command("show", epilog=EPILOG)
def show(
    name: Name,
    *,
    every: Annotated[bool, typer.Option("--all", help=f"All holders and waiters; {MOST} of each at most.")] = False,
    url: Urls = None,
    prefix: Prefix = "lock:",
    as_json: AsJson = False,
) -> int:
    """Say who holds a name, where, since when and for how long; and who waits for it."""
    with connect(url, prefix, "interlock show") as locks:
        view = look(locks, name, MOST if every else LISTED, twice=True)
        near = near_names(locks, view, url) if view.kind is None else []
    if not every:
        most = MOST_JSON if as_json else FIRST
        view = replace(view, holders=view.holders[:most], waiters=view.waiters[:most])
    if as_json:
        print_json(view.as_json() | {"near": near})
    elif not view.is_known:
        print(nothing_known(view) + (f". In use: {', '.join(map(safe, near))}" if near else ""))
    else:
        describe(console(), view)
    return 0 if view.is_known else NOTHING_THERE


def near_names(locks: Interlock, view: View, urls: Sequence[str] | None) -> list[str]:
    """Names like this one that the server knows or a process uses. First those that contain it, or are part of it."""
    from interlock._doctor.names_in_use import names_with  # noqa: PLC0415  # imports redis-py

    used = names_with(urls, locks.prefix)
    with contextlib.suppress(LockError):  # the right to read the registry may be missing
        used |= {each.name for each in locks.ls() if each.prefix == locks.prefix}
    wanted, folded = view.name.casefold(), {name.casefold(): name for name in sorted(used)}
    containing = [name for each, name in folded.items() if wanted in each or each in wanted]
    alike = [folded[each] for each in difflib.get_close_matches(wanted, folded, NEAR, LIKE)]
    return list(dict.fromkeys([*containing, *alike]))[:NEAR]


def nothing_known(view: View) -> str:
    """What to say of a name that nobody has used lately, or that is not interlock's."""
    name, key = safe(view.name), safe(repr(view.key))
    if view.kind is None:
        return f"{name}: the server has nothing under the key {key}: nobody holds it or waits"
    whose = "data of something else" if view.kind == OTHER else "in use by another version of interlock"
    return f"{name}: the key {key} is {whose}: interlock can't say who holds it"


def describe(out: Console, view: View) -> None:
    """Print a view for people."""
    out.print(Text.assemble((safe(view.name), "bold"), f"  {view.kind}"))
    rows = list[tuple[str, Text | str]]()
    rows.append(("state", _state(view)))
    if view.motion:
        rows.append((view.motion, _motion(view)))
    rows += _of_kind(view)
    if len(view.holders) == 1:
        title = "holder" if view.holders[0].confirmed else "to"
        rows += [(title if not i else "", text) for i, text in enumerate(describe_party(view.holders[0]))]
        rows += _of_holder(view.holders[0])
    elif view.fence and not view.holders:
        rows.append(("last fence", str(view.fence)))
    print_rows(out, rows)
    if len(view.holders) > 1:
        _print_parties(out, f"holders ({view.holding})", view.holders, view.holding)
    if view.waiting:
        title = f"waiters, in order ({callers(view.processes, view.waiting)})"
        _print_parties(out, title, view.waiters, view.waiting)


def _state(view: View) -> Text:
    text = Text.assemble((view.state, STYLES.get(view.state, "red")))
    if view.state == HANDING_OVER:  # to the holder below, which has not begun its section yet
        return text
    holder = view.holders[0] if len(view.holders) == 1 else None
    if holder is not None and holder.since is not None:
        text.append(f" for {span(holder.since)}")
    if holder is not None and holder.revoked is not None:
        text.append(f", revoked: {safe(holder.revoked)}", "red")
    if view.quarantine is not None:
        text.append(
            f" for {span(view.quarantine)} more: the server restarted or was replaced, and may have lost a lease that "
            "is alive"
        )
    if view.broken is not None:
        text.append(f": {safe(view.broken)}")
    return text


def _motion(view: View) -> Text:
    """Whether it moves or is stuck, for the callers that wait."""
    if view.motion == STUCK:
        return Text(f"it has not passed on for {span(view.unchanged or 0.0)}, while others wait: stuck", "red")
    served = "" if view.handovers is None else f", {moves(view.motion, view.handovers, None)} from process to process"
    return Text(f"it passes from holder to holder{served}")


def _of_kind(view: View) -> list[tuple[str, Text | str]]:
    rows = list[tuple[str, Text | str]]()
    if view.limit is not None:
        rows.append(("permits", f"{view.used} of {view.limit} in use"))
    if view.count is not None:
        rows.append(("count", f"{view.left} of {view.count} left"))
    if view.expires is not None:
        rows.append(("forgotten", f"in {span(view.expires)}, unless somebody uses it"))
    if view.parties is not None:
        rows.append(("arrived", f"{view.waiting} of {view.parties} parties"))
    if view.last_run is not None:
        rows.append(("last run", _of_run(view.last_run)))
    if view.next_run is not None:
        rows.append(("next run", f"in {span(view.next_run)} at the earliest"))
    return rows


def _of_run(last: dict[str, str | None]) -> str:
    began, ended = (
        f"{dt.datetime.fromisoformat(at).astimezone():{TIME}}" if at else "" for at in (last["started"], last["ended"])
    )
    began, ended = began or "a time that is not known", f"to {ended}" if ended else "on, with no end that is known"
    return f"by {last['by'] or 'somebody'}, from {began} {ended}"


def _of_holder(holder: Holder) -> list[tuple[str, Text | str]]:
    rows = list[tuple[str, Text | str]]()
    if holder.since is not None:
        since = dt.datetime.now(dt.UTC).astimezone() - dt.timedelta(seconds=holder.since)
        rows.append(("since", f"{since:{TIME}} (by this machine's clock)"))
    rows.append(("lease", _lease(holder)))
    if holder.fence:
        rows.append(("fence", str(holder.fence)))
    if holder.permits and holder.permits > 1:
        rows.append(("permits", str(holder.permits)))
    rows.append(("token", shortened(holder.token)))
    return rows


def _lease(holder: Holder) -> str:
    if holder.remaining is None:
        return "has no end: a client of another library set none"
    if holder.revoked is not None:
        return f"ends in {span(holder.remaining)}, since it was revoked"
    return f"ends in {span(holder.remaining)}, unless its process renews it"


def describe_party(party: Party) -> list[str]:
    """Who this is, in lines for people: what its token says, and where it stands in its code."""
    if party.host is None:
        return [shortened(party.token), "a client of another library: it writes no host and no process"]
    label = f"{party.label}@" if party.label else ""
    side = f" {party.side}s" if isinstance(party, Holder | Waiter) and party.side else ""
    owner = f", owner {party.owner}" if party.owner else ""
    lines = [f"{label}{party.host}, process {party.pid}, {party.caller}{owner}{side}"]
    if party.place:
        lines.append(f"at {party.place}")
    if party.trace_id:
        lines.append(f"trace {party.trace_id}")
    if party.gone or (party.reported_ago is not None and party.reported_ago > SILENT_AFTER):
        lines.append(_silence(party))
    return lines


def _silence(party: Party) -> str:
    text = f"its process has not reported for {span(party.reported_ago or 0)}: it may be dead"
    if party.gone:
        text = "its process has ended"
    if isinstance(party, Holder) and party.remaining is not None:
        text += f"; its lease ends in {span(party.remaining)}"
    return text


def _print_parties(out: Console, title: str, parties: Sequence[Holder | Waiter], number: int) -> None:
    out.print(Text(f"  {title}", "dim"))
    for i, party in enumerate(parties, 1):
        first, *more = describe_party(party)
        more_of_it = list[str]()
        if party.permits and party.permits > 1:
            more_of_it.append(f"{party.permits} permits")
        if party.since is not None:
            more_of_it.append(f"for {span(party.since)}")
        if isinstance(party, Holder):
            if party.remaining is not None:
                more_of_it.append(f"lease ends in {span(party.remaining)}")
            if party.revoked is not None:
                more_of_it.append(f"revoked: {party.revoked}")
        out.print(Text(f"  {i:>4}  {safe(', '.join([first, *more_of_it]))}"))
        for line in more:
            out.print(Text(f"        {safe(line)}"))
    if number > len(parties):
        out.print(Text(f"        and {number - len(parties)} more" + ("" if len(parties) >= MOST else ": --all")))
