"""The command `interlock quorum`: which servers of a quorum count, and what only an operator can know of them."""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from interlock._protocol.names import checked_name, duration
from interlock._protocol.timing import MAX_TTL
from interlock._quarantine.voter import voter_key
from interlock.cli.exit_status import EX_TEMPFAIL, EX_UNAVAILABLE, EX_USAGE, NOTHING_THERE
from interlock.cli.options import TIME, AsJson, Prefix
from interlock.cli.output import console, print_json, print_table, quiet, safe, span
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from interlock.cli.quorum.members import Member

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)
MIN_MAX_TTL: Final = 0.01  # seconds
NEVER: Final = (
    "Never in a start script, a compose file or a Helm hook: run there after a crash, it would let servers count that "
    "have just forgotten leases which are alive."
)

Members: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="URL", help="Every server of the quorum, as your programs name it.")
]
LongestTtl: TypeAlias = Annotated[
    float, typer.Option("--max-ttl", metavar="SECONDS", help="The longest max_ttl of all your programs.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask. " + NEVER)]

EPILOG: Final = """\b
interlock quorum show redis://a redis://b redis://c      which of them count, and from when on
interlock quorum new redis://a redis://b redis://c       a new quorum, before its first use
interlock quorum adopt redis://a redis://b redis://c     once, before an upgrade to this version

A server of a quorum counts max_ttl after a client first reached it since it was started, emptied or given other data:
until then it may have forgotten leases that are alive. Only you can know that it has not. `new`: nobody has had a lease
of this quorum within max_ttl. `adopt`: it has served all along. A server that you replace or restart needs neither: it
counts by itself.

Exit status: 0; 1 if you said no; 64 for a bad option or for a server that can be in no quorum, 69 if one does not
answer, 75 if one may have forgotten leases, or has changed meanwhile."""


@app.callback(invoke_without_command=True, epilog=EPILOG)
def quorum(context: typer.Context) -> None:
    """Say which servers of a quorum count, and let servers count of which you know that they have forgotten nothing."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@dataclass
class Outcome:
    """How it ended, for people and for --json."""

    result: str = "shown"
    """shown; written, nothing to do; declined; refused, in part."""
    status: int = 0
    text: str = ""
    written: list[str] = field(default_factory=list[str])
    """The URLs of the servers whose record was written."""
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Why, by URL."""


@app.command(short_help="Say which servers count, and which do not yet.")
def show(urls: Members, *, prefix: Prefix = "lock:", max_ttl: LongestTtl = MAX_TTL, as_json: AsJson = False) -> int:
    """Say of each server whether it counts, since when, and what it has under the prefix. It changes nothing."""
    members = _look(urls, prefix, max_ttl)
    problems = {each.url: _why_silent(each) if each.error else each.why_no_member for each in members}
    outcome = Outcome(refused={url: why for url, why in problems.items() if why})
    outcome.status = EX_UNAVAILABLE if any(each.error for each in members) else 0
    return _end(outcome, members, prefix, as_json=as_json)


@app.command(short_help="Let the servers of a new quorum count at once.")
def new(
    urls: Members,
    *,
    nobody_at_work: Annotated[
        bool,
        typer.Option(
            "--nobody-at-work",
            help="Even if names were granted there lately, or leases are alive: no process relies on them.",
        ),
    ] = False,
    yes: Yes = False,
    prefix: Prefix = "lock:",
    max_ttl: LongestTtl = MAX_TTL,
    as_json: AsJson = False,
) -> int:
    """Let the servers of a new quorum count at once, and not only after max_ttl. You state that no lease is alive.

    A new quorum and one that has restarted empty look the same, so this asks you. Never in a start script, a compose
    file or a Helm hook: run there after a crash, it would let servers count that have just forgotten leases which are
    alive. It writes to all of the servers or, if one of them is not as it must be, to none.
    """

    def objection(member: Member) -> str:
        return "" if nobody_at_work else _why_not_new(member)

    question = (
        f"Nobody has had a lease of this quorum within the last {span(max_ttl)}, and nobody has one now: is that so? "
        "Then these servers count at once"
    )
    stating = Stating(urls, prefix, max_ttl, objection, {"new", "changed", "abstains"})
    return stating.run(question, yes=yes, as_json=as_json)


@app.command(short_help="Let servers that have served all along go on, before an upgrade.")
def adopt(
    urls: Members,
    *,
    promoted_earlier: Annotated[
        bool,
        typer.Option(
            "--promoted-earlier", help="Even if a server was a replica once: it was promoted more than --max-ttl ago."
        ),
    ] = False,
    yes: Yes = False,
    prefix: Prefix = "lock:",
    max_ttl: LongestTtl = MAX_TTL,
    as_json: AsJson = False,
) -> int:
    """Let servers of an earlier version's quorum go on to count, with the leases that are alive there.

    Run it once, before the first process of this version starts. It checks that each process is older than max_ttl and
    never was a replica, and writes only where there is no record. You state the rest: within max_ttl nobody has emptied
    the server, deleted or restored its keys, or set its clock. Never in a start script, a compose file or a Helm hook:
    run there after a crash, it would let servers count that have just forgotten leases which are alive.
    """

    def objection(member: Member) -> str:
        return _why_not_all_along(member, promoted_earlier=promoted_earlier)

    question = (
        f"Within the last {span(max_ttl)} nobody has emptied these servers, deleted or restored their keys, or set "
        "their clocks: is that so? Then they go on to count"
    )
    return Stating(urls, prefix, max_ttl, objection, {"new"}).run(question, yes=yes, as_json=as_json)


def _look(urls: Sequence[str], prefix: str, max_ttl: float) -> list[Member]:
    from interlock.cli.quorum.members import look_at  # noqa: PLC0415  # imports redis-py, which --help does without

    duration(max_ttl, "--max-ttl", minimum=MIN_MAX_TTL)
    if prefix:
        checked_name(prefix, "prefix")
    voter_key(prefix)  # or ConfigError, before anything is asked
    with quiet():  # the command itself says what is wrong
        return look_at(urls, prefix, max_ttl)


# Why not


def _why_not_new(member: Member) -> str:
    if member.leases:
        found = f"has {member.leases} {'leases that are' if member.leases > 1 else 'lease that is'} alive"
    elif member.granted:
        found = f"has granted {member.granted} name{'s' * (member.granted > 1)} within the last minutes"
    elif member.knows_all_names:
        return ""
    elif member.may_scan:
        found = "has too many keys to look at all of them"
    else:
        found = "does not let its user look for names (give it the right +scan)"
    return (
        f"{found}, so the quorum may not be new. A server that was restarted or replaced counts by itself, "
        f"{span(member.max_ttl)} after a client first reached it. If all programs have ended, and nobody is at work, "
        "--nobody-at-work; if you upgrade servers that have served all along, interlock quorum adopt"
    )


def _why_not_all_along(member: Member, *, promoted_earlier: bool) -> str:
    if member.standing.record is not None:  # which stays as it is
        return ""
    leave_it = f"Leave it out: it counts by itself, {span(member.max_ttl)} after a client of this version reaches it"
    if member.uptime - 1 < member.max_ttl:
        return f"started {span(member.uptime)} ago, so it may have forgotten leases that are alive. {leave_it}"
    if member.was_replica and not promoted_earlier:
        return (
            f"has had the data of another server, and does not say when. {leave_it}; if it was promoted more than "
            f"{span(member.max_ttl)} ago, --promoted-earlier"
        )
    return ""


def _why_silent(member: Member) -> str:
    return ". ".join(filter(None, (f"can't be asked: {member.error}".rstrip("."), member.advice)))


# One run of `new` or `adopt`


class Stating:
    """Writes the records of those servers whose standing is one of `writable`: of all of them, or of none."""

    def __init__(
        self, urls: Sequence[str], prefix: str, max_ttl: float, objection: Callable[[Member], str], writable: set[str]
    ) -> None:
        self.urls, self.prefix, self.max_ttl = urls, prefix, max_ttl
        self.objection, self.writable = objection, writable
        self.members: list[Member] = []
        self.outcome = Outcome()

    def run(self, question: str, *, yes: bool, as_json: bool) -> int:
        """Look, ask, look again, write. Returns the exit status."""
        self._look()
        is_printed = not self.outcome.refused and bool(self._meant) and not as_json
        if not self._meant and not self.outcome.refused:
            self.outcome = Outcome("nothing to do", text=_nothing_to_do(self.members))
        elif not self.outcome.refused:
            if not yes and not sys.stdin.isatty():
                raise ConfigError(f"nobody is here to say so. In a script that a person starts: --yes. {NEVER}")
            if is_printed:
                _print_members(self.members)
            if self._is_agreed(question, yes=yes):
                self._write()
        return _end(self.outcome, self.members, self.prefix, as_json=as_json, is_printed=is_printed)

    @property
    def _meant(self) -> list[Member]:
        return [each for each in self.members if each.standing.state in self.writable]

    def _look(self) -> None:
        """Ask all servers, and note why nothing can be written."""
        self.members, self.outcome = _look(self.urls, self.prefix, self.max_ttl), Outcome("refused")
        statuses, urls_by_process, writes = set[int](), dict[str, str](), bool(self._meant)
        for member in self.members:
            first = urls_by_process.setdefault(member.info.get("run_id", member.url), member.url)
            if member.error:
                why, status = _why_silent(member), EX_UNAVAILABLE if member.advice else EX_USAGE
            elif first != member.url:
                why, status = f"is the same server as {first}, but a server has one vote. Name it once", EX_USAGE
            elif why := member.why_no_member:
                status = EX_USAGE
            else:
                why, status = self.objection(member) if writes else "", EX_TEMPFAIL
            if why:
                self.outcome.refused[member.url] = why
                statuses.add(status)
        self.outcome.status = min(statuses, default=0)

    def _is_agreed(self, question: str, *, yes: bool) -> bool:
        """Whether a person agrees, and nothing has changed while the person thought."""
        if yes:
            return True
        if not typer.confirm(question, err=True):
            self.outcome = Outcome("declined", NOTHING_THERE, "nothing was written")
            return False
        seen = self.members
        self._look()
        for now, before in zip(self.members, seen, strict=True):
            if not now.is_as(before):
                self.outcome.refused.setdefault(now.url, now.CHANGED)
                self.outcome.status = self.outcome.status or EX_TEMPFAIL
        return not self.outcome.refused

    def _write(self) -> None:
        """Write to one server after the other, as far as the first at which that fails."""
        outcome, at_work = self.outcome, ""
        try:
            for member in self._meant:
                at_work = member.url
                if why := member.state_that_it_counts():
                    outcome.result, outcome.status, outcome.refused = "in part", EX_TEMPFAIL, {at_work: why}
                    outcome.text = f"{_written(outcome)}. Nothing was written behind it; look: interlock quorum show"
                    return
                outcome.written.append(at_work)
        except BaseException:
            print(f"interlock: interrupted at {safe(at_work)}. {_written(outcome)}", file=sys.stderr)
            raise
        outcome.result, outcome.text = "written", f"{', '.join(outcome.written)}: counts now"


def _written(outcome: Outcome) -> str:
    return f"Written before: {', '.join(map(safe, outcome.written)) or 'nothing'}"


def _nothing_to_do(members: Sequence[Member]) -> str:
    waiting = [each for each in members if each.standing.wait]
    if not waiting:
        return "nothing to do: each of them counts"
    return f"nothing to do: a client has reached each of them; {', '.join(each.url for each in waiting)} will count"


# Printing


def _end(outcome: Outcome, members: Sequence[Member], prefix: str, *, as_json: bool, is_printed: bool = False) -> int:
    if as_json:
        found = {"result": outcome.result, "prefix": prefix, "members": [*map(_as_json, members)]}
        print_json(found | {"written": outcome.written, "refused": outcome.refused, "text": outcome.text})
        return outcome.status
    if not is_printed:
        _print_members(members)
    for url, why in outcome.refused.items():
        print(f"interlock: {safe(url)} {safe(why)}", file=sys.stderr)
    if outcome.result == "refused":
        print("interlock: nothing was written", file=sys.stderr)
    if outcome.text:
        print(safe(outcome.text), file=sys.stderr if outcome.status else sys.stdout)
    return outcome.status


def _print_members(members: Sequence[Member]) -> None:
    heads = ("SERVER", "UP", "ROLE", "NAMES", "LEASES", "SINCE", "NOW")
    print_table(console(), heads, [_row(each) for each in members])


def _row(member: Member) -> tuple[str, ...]:
    if member.error:
        return (member.url, "-", "-", "-", "-", "-", "can't be asked")
    record, role = member.standing.record, member.info.get("role", "-")
    since = "-"
    if record is not None and record.since_ms <= member.now_ms:
        since = f"{dt.datetime.fromtimestamp(record.since_ms / 1000).astimezone():{TIME}}"
    names = f"{member.names}{'' if member.knows_all_names else ' or more'}" if member.may_scan else "?"
    now = "can't count" if member.why_no_member else member.standing.sentence(span(member.standing.wait))
    return (
        member.url, span(member.uptime), {"master": "primary", "slave": "replica"}.get(role, role), names,
        str(member.leases) if member.may_scan else "?", since, now,
    )  # fmt: skip


def _as_json(member: Member) -> dict[str, Any]:
    found: dict[str, Any] = {"url": member.url, "error": member.error or None}
    if member.error:
        return found
    standing = member.standing
    record = standing.record
    return found | {
        "problem": member.why_no_member or None,
        "state": standing.state,
        "wait": standing.wait,
        "since": record and record.since_ms / 1000,
        "longest_max_ttl": record and record.longest_ms / 1000,
        "role": member.info.get("role"),
        "run_id": member.info.get("run_id"),
        "uptime": member.uptime,
        "names": member.names,
        "granted": member.granted,
        "leases": member.leases,
        "knows_all_names": member.knows_all_names,
    }
