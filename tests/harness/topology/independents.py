"""Servers that know nothing of each other, for a quorum; and the voter records that tests write there.

A server of a quorum counts `max_ttl` after a client first reached it (ADR 60). A client can't say "new": a new server
looks like one that restarted empty. So a test says here for how long its servers have served, as a person does by
`interlock quorum new`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.servers import Node
from interlock._quarantine.voter import RECORD_TTL, VoterRecord, voter_key

from .group import Group, ask, info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.embedded import Server

HOUR = 3600.0  # seconds


class Independents(Group):
    """Servers that know nothing of each other, for a quorum. They have served for an hour, unless they are `new`.

    with Independents(number=5) as servers:
        servers.nodes[0].kill()
        Interlock.quorum(servers.urls)
    """

    def __init__(
        self,
        kind: str = "valkey-9.1",
        *,
        number: int = 5,
        config: Mapping[str, str] | None = None,
        new: bool = False,
    ) -> None:
        super().__init__(Node(kind, config=config) for _ in range(number))
        self._new = new

    @property
    def urls(self) -> list[str]:
        """Where to connect, one URL for each."""
        return [node.url for node in self.nodes]

    def _form(self) -> None:
        if not self._new:
            serve_long(*self.nodes)


def serve_long(*nodes: Server, prefix: str = "lock:", seconds: float = HOUR, longest: float = 0.0) -> None:
    """Let these servers have served for so many seconds, as far as clients of this prefix can know.

    `longest` is the longest max_ttl (seconds) that a client has had there.
    """
    for node in nodes:
        now_ms = int(ask(node, "TIME")[0]) * 1000
        record = VoterRecord(info(node)["master_replid"], round(now_ms - seconds * 1000), round(longest * 1000))
        write_voter(node, record.encode(), prefix=prefix)


def empty(*nodes: Server) -> None:
    """Remove all keys of these servers, which have served for long all the same."""
    for node in nodes:
        ask(node, "FLUSHALL")
    serve_long(*nodes)


def write_voter(node: Server, text: str, *, prefix: str = "lock:") -> None:
    """Write this text in place of the voter record."""
    ask(node, "SET", voter_key(prefix), text, "PX", round(RECORD_TTL * 1000))


def voter_of(node: Server, prefix: str = "lock:") -> VoterRecord | None:
    """The voter record of this server; None if it has none."""
    text = ask(node, "GET", voter_key(prefix))
    return VoterRecord.parse(text) if text else None
