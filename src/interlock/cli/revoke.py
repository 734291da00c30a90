"""`interlock revoke`: takes a name away from its holder. It asks the holder first, and uses force only with `--force`.

Rules. (a) A revocation names the holders that were seen, so it never takes a lease from a later holder. (b)
Every revocation is in the audit, with its result (`_people/revocation.py`). (c) Force comes after the grace, in which
the holder may give the lease back; the text says that the former holder may still be at work.
"""

from __future__ import annotations

import getpass
import secrets
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import typer

from interlock._client.inspecting import inspect
from interlock._people.revocation import Revoking, reason_text, value_of
from interlock._protocol.names import duration
from interlock._protocol.run_to_end import run
from interlock.cli.exit_status import EX_TEMPFAIL, NOTHING_THERE
from interlock.cli.lookup import MOST, Holder, View, glance, look
from interlock.cli.options import AsJson, Name, Prefix, Urls, connect
from interlock.cli.output import print_json, safe, span
from interlock.cli.show import describe_party, nothing_known
from interlock.cli.wait import Progress, short
from interlock.errors import ConfigError, Unavailable
from interlock.primitives.codes import PLAIN, QUARANTINE
from interlock.primitives.kind import resource_of
from interlock.primitives.kinds import kind_named
from interlock.primitives.messages import BreakCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock._protocol.resource import Resource
    from interlock.threads import Interlock

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
DEFAULT_GRACE: Final = 5.0  # seconds
PAUSE: Final = 0.1  # seconds between two looks whether the holder has gone
MAX_LISTED: Final = 10  # holders that the question names
AT_WORK: Final = "its former holder may still be at work, and only guards that check the fence refuse what it writes"

EPILOG = """\b
interlock revoke stock:42 --reason "the import hangs"
interlock revoke stock:42 --reason "the import hangs" --force
interlock revoke api --holder web-3 --reason "web-3 is replaced"     one holder of several

It asks the holder, which learns of it within a second, can renew no more, and should stop; then it waits --grace
seconds until the holder has gone. If it has not, the lease ends by itself within its ttl. With --force the lease is
taken after the grace, and the next waiter gets it: the former holder may still be at work. It never revokes a holder
that came after those that it has shown. Who revoked what, and why, is in `interlock audit`.

Exit status: 0 if the holders have gone, 1 if there was none or you said no, 75 if one still holds it, 64 for a bad name
or option, 69 if no server answers."""


@dataclass
class Outcome:
    """How it ended, for people and for --json."""

    name: str
    kind: str | None
    result: str = "nobody"
    """released, taken, broken (a latch or barrier), ended (a quarantine), dry run; holds, refused; nobody, gone,
    declined."""
    text: str = ""
    holders: list[str] = field(default_factory=list[str])
    """The tokens of those that were revoked."""
    left: list[str] = field(default_factory=list[str])
    """The tokens of those that still hold."""

    @property
    def status(self) -> int:
        """The exit status."""
        if self.result in {"nobody", "declined", "gone"}:
            return NOTHING_THERE
        return EX_TEMPFAIL if self.result in {"holds", "refused"} else 0


@app.command("revoke", epilog=EPILOG)
def revoke(
    name: Name,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: the holder and the audit get it.")],
    force: Annotated[bool, typer.Option("--force", help="Take it after the grace, even if it is in use.")] = False,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the holder may take to go.")
    ] = DEFAULT_GRACE,
    holder: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only holders whose token contains TEXT: a host, a process.")
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask; of several holders, revoke all.")] = False,
    dry_run: Annotated[
        bool, typer.Option("-n", "--dry-run", help="Say who would be revoked, and revoke nobody.")
    ] = False,
    url: Urls = None,
    prefix: Prefix = "lock:",
    as_json: AsJson = False,
) -> int:
    """Take a name away from whoever holds it: ask the holder, and with --force take it."""
    grace = duration(grace, "--grace")
    if holder == "":  # as of a variable that is not set: it would be part of every token
        raise ConfigError("--holder needs a text: a part of the token of the holder that you mean")
    with connect(url, prefix, f"interlock revoke by {_user()}") as locks:
        outcome = Revoke(locks, name, reason, force=force, grace=grace, yes=yes, dry_run=dry_run).run(holder)
    if as_json:
        fields = {"name": name, "kind": outcome.kind, "result": outcome.result, "forced": force, "reason": reason}
        print_json(fields | {"holders": outcome.holders, "left": outcome.left, "text": outcome.text})
    else:
        print(outcome.text, file=sys.stderr if outcome.status else sys.stdout)
    return outcome.status


class Revoke:
    """One run of the command."""

    def __init__(
        self, locks: Interlock, name: str, reason: str, *, force: bool, grace: float, yes: bool, dry_run: bool
    ) -> None:
        self.locks, self.name, self.reason, self.shown = locks, name, reason, safe(name)
        self.force, self.grace, self.yes, self.dry_run = force, grace, yes, dry_run
        self.core = locks._session.core
        self.is_chosen = False  # whether --holder says who is meant

    def run(self, wanted: str | None) -> Outcome:
        """Revoke those that hold it now, of whose tokens `wanted` is a part. Raises Unavailable or ConfigError."""
        self.is_chosen = wanted is not None
        view = look(self.locks, self.name, MOST)
        outcome = Outcome(self.name, view.kind)
        if not view.is_known:
            outcome.text = nothing_known(view)
            return outcome
        assert view.kind is not None
        resource = resource_of(view.kind, self.name, self.locks.prefix)
        self.reason = reason_text(resource, self.reason)
        if not kind_named(view.kind).has_holders:
            return self._break(view, resource, outcome)
        if view.quarantine is not None:
            return self._end_quarantine(view, resource, outcome)
        seen = [holder for holder in view.holders if wanted is None or wanted in holder.token]
        if seen:
            return self._revoke_holders(seen, view, resource, outcome)
        held = f"; {short(view)}, whose token does not contain {wanted!r}" if view.holders else ""
        outcome.text = f"{self.shown}: nobody to revoke{safe(held)}"
        return outcome

    def _revoke_holders(self, seen: list[Holder], view: View, resource: Resource, outcome: Outcome) -> Outcome:
        outcome.holders = [holder.token for holder in seen]
        if view.kind == PLAIN and not self.force:
            outcome.result, outcome.left = "refused", outcome.holders
            outcome.text = (
                f"{self.shown} is {short(view)}, a client of another library, which can't be asked. If nobody is at "
                "work there, use --force"
            )
            return outcome
        if len(seen) > 1 and not (self.is_chosen or self.yes or self.dry_run or sys.stdin.isatty()):
            raise ConfigError(
                f"{resource} has {len(seen)} holders: say which of them with --holder TEXT, or --yes for all of them"
            )
        if not self._agreed(self._question(seen), outcome):
            return outcome
        if view.kind == PLAIN:
            return self._take(seen, resource, outcome)
        return self._ask_and_wait(seen, resource, outcome)

    # Asking, and taking

    def _ask_and_wait(self, seen: Sequence[Holder], resource: Resource, outcome: Outcome) -> Outcome:
        began = time.monotonic()
        asking = Revoking(self.core, resource, self.reason, force=False)
        new = [holder.token.encode() for holder in seen if holder.revoked is None]
        if new and not run(asking.revoke(new)):
            return self._was_gone(outcome)
        try:
            left = self._wait_for_release(seen, began)
        except Unavailable as error:
            raise Unavailable(
                f"{self.shown}: {_names(seen)} was asked to give it back, and nobody knows whether it has: {error}"
            ) from error
        if not left and glance(self.locks, self.name, 1).quarantine is not None:
            run(asking.note("unknown: the server was restarted or replaced"))
            outcome.result = "gone"
            outcome.text = (
                f"{self.shown}: {_names(seen)} was asked to give it back, but the server was restarted or replaced, "
                f"and has lost the lease: it may still be at work{self._now()}"
            )
            return outcome
        if not left:
            took = time.monotonic() - began
            # Nobody renews a lease that was revoked. A holder that is dead or stopped gives nothing back.
            ended = any(holder.remaining is not None and holder.remaining - PAUSE <= took for holder in seen)
            run(asking.note(f"{'its lease ended' if ended else 'released'} after {took:.1f} s"))
            outcome.result = "released"
            how = "did not give it back, but its lease ended" if ended else "gave it back"
            outcome.text = f"{self.shown}: {_names(seen)} {how} after {span(took)}{self._now()}"
            return outcome
        run(asking.note(f"not released within {self.grace:g} s"))
        if self.force:
            return self._take(left, resource, outcome)
        outcome.result, outcome.left = "holds", [holder.token for holder in left]
        ends = max(holder.remaining or 0.0 for holder in left)
        outcome.text = (
            f"{self.shown}: {_names(left)} was asked, and still holds it after {span(self.grace)}. Its lease is "
            f"renewed no more and ends in {span(ends)}; to take it now, though its holder may be at work, use --force"
        )
        return outcome

    def _take(self, seen: Sequence[Holder], resource: Resource, outcome: Outcome) -> Outcome:
        taking = Revoking(self.core, resource, self.reason, force=True)
        values = [
            run(value_of(self.core, resource, holder.token, is_revoked=holder.revoked is not None)) for holder in seen
        ]
        if not run(taking.revoke(values)):
            return self._was_gone(outcome)
        outcome.result = "taken"
        outcome.text = f"{self.shown} was taken from {_names(seen)}: {AT_WORK}{self._now()}"
        return outcome

    def _wait_for_release(self, seen: Sequence[Holder], began: float) -> list[Holder]:
        """Look until none of these holds it, for the time of the grace. Returns those that still hold."""
        tokens = {holder.token for holder in seen}
        with Progress() as progress:
            while True:
                left = [holder for holder in glance(self.locks, self.name, MOST).holders if holder.token in tokens]
                time_left = began + self.grace - time.monotonic()
                if not left or time_left <= 0:
                    return left
                progress.show(f"asked {_names(left)}; waiting for {span(time_left)} more until it has gone")
                time.sleep(max(0.001, min(PAUSE, time_left)))

    def _was_gone(self, outcome: Outcome) -> Outcome:
        outcome.result = "gone"
        outcome.text = f"{self.shown}: its holder had gone before, so nobody was revoked{self._now()}"
        return outcome

    def _now(self) -> str:
        """What became of it."""
        view = look(self.locks, self.name, 1)
        return f". Now it is {short(view)}" if view.is_busy else ". Now it is free"

    # A quarantine, a latch, a barrier

    def _end_quarantine(self, view: View, resource: Resource, outcome: Outcome) -> Outcome:
        outcome.left, left = [QUARANTINE.decode()], span(view.quarantine or 0.0)
        if not self.force:
            outcome.result = "refused"
            outcome.text = (
                f"{self.shown}: nobody is known to hold it, but it is in quarantine for {left} more, since a lease may "
                "have been lost that is alive. Wait; or, if nothing is at work under this name, use --force"
            )
            return outcome
        question = f"End the quarantine of {self.shown}, {left} early? Two may be at work, if a lease was lost"
        if not self._agreed(question, outcome):
            return outcome
        marker = kind_named(resource.kind).marker_in(run(inspect(self.core, resource, "1")))
        done = marker and run(Revoking(self.core, resource, self.reason, force=True).revoke([marker]))
        if not done:
            return self._was_gone(outcome)
        outcome.result, outcome.left = "ended", []
        outcome.text = f"{self.shown}: its quarantine has been ended{self._now()}"
        return outcome

    def _break(self, view: View, resource: Resource, outcome: Outcome) -> Outcome:
        if not self._agreed(f"Break the {view.kind} {self.shown} for the {view.waiting} who wait for it?", outcome):
            return outcome
        revoking = Revoking(self.core, resource, self.reason, force=False)
        call = BreakCall(f"revoke/{secrets.token_hex(16)}", f"it was revoked: {revoking.why}")
        if not run(revoking.send([], [call])):
            outcome.text = f"{self.shown}: there is no {view.kind} to break: it is open, broken or gone"
            return outcome
        outcome.result = "broken"
        outcome.text = f"{self.shown}: the {view.kind} is broken, and the {view.waiting} who waited for it know so"
        return outcome

    # Questions

    def _question(self, seen: Sequence[Holder]) -> str:
        holders = "\n".join(f"  {safe(_line(holder))}" for holder in seen[:MAX_LISTED])
        more = f"\n  and {len(seen) - MAX_LISTED} more" if len(seen) > MAX_LISTED else ""
        warning = f"\nWith --force it is taken after {span(self.grace)}: {AT_WORK}." if self.force else ""
        return f"{self.shown} is held by\n{holders}{more}{warning}\nRevoke it?"

    def _agreed(self, question: str, outcome: Outcome) -> bool:
        """Whether to go on: the person at the terminal agrees, or nobody is there to be asked."""
        if self.dry_run:
            outcome.result, outcome.text = "dry run", question.rpartition("\n")[0] or question
            return False
        if self.yes or not sys.stdin.isatty():
            return True
        if typer.confirm(question, err=True):
            return True
        outcome.result, outcome.text, outcome.holders = "declined", f"{self.shown}: nobody was revoked", []
        return False


def _line(holder: Holder) -> str:
    since = f", for {span(holder.since)}" if holder.since is not None else ""
    revoked = f", revoked already: {holder.revoked}" if holder.revoked is not None else ""
    return ", ".join(describe_party(holder)) + since + revoked


def _names(holders: Sequence[Holder]) -> str:
    first = safe(describe_party(holders[0])[0])
    return first if len(holders) == 1 else f"{first} and {len(holders) - 1} others"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        return "somebody"
