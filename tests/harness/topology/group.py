"""Servers that belong together: they start side by side, have names, and can be cut off from each other.

There are no network namespaces here, so a cut is made by ACL. Every server introduces itself to the others as a user
of its own. To cut two off is to turn their users away and to kill the connections they have; ordinary clients, who
are the default user, notice nothing. Where servers must fall silent while their connections stay open, as when a
machine dies or a firewall drops packets, they reach each other over a `Bus`.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import UnixDomainSocketConnection
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

    from harness.servers import Node
    from interlock.embedded import Server

    from .bus import Bus

PATIENCE: Final = 30.0  # seconds; most waits take a few, and some with sentinels of 6.2, which look every 10 s, more
SILENCE: Final = 5.0  # seconds without an answer after which a server is given up
QUICK: Final = {"repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
_CONNECTION: Final[Any] = UnixDomainSocketConnection
TLS = tuple[str, str, str]  # the files of a certificate, its key and its authority, see Node
OVER_TLS: Final = {"tls-replication": "yes"}
GONE: Final = (redis.ConnectionError, redis.TimeoutError)


def tls_query(tls: TLS | None) -> str:
    """The part of a URL that trusts these servers."""
    return f"?ssl_ca_certs={tls[2]}" if tls else ""


def ask(node: Server, *command: str | int | bytes, within: float = SILENCE) -> Any:
    """What the server answers to one command."""
    return ask_all(node, [command], within=within)[0]


def ask_all(node: Server, commands: Sequence[Sequence[str | int | bytes]], *, within: float = SILENCE) -> list[Any]:
    """What the server answers to commands that reach it in one write. Raises the first error, after the last."""
    connection: Any = _CONNECTION(
        path=str(node.socket), protocol=2, decode_responses=True, socket_timeout=within, retry=Retry(NoBackoff(), 0)
    )
    try:
        connection.connect()
        connection.send_packed_command(connection.pack_commands(commands))
        answers = [_answer(connection) for _ in commands]
    finally:
        connection.disconnect()
    for answer in answers:
        if isinstance(answer, redis.ResponseError):
            raise answer
    return answers


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def info(node: Server, section: str = "replication") -> dict[str, str]:
    """A section of INFO."""
    return fields(ask(node, "INFO", section))


def fields(text: str) -> dict[str, str]:
    """The fields of `name:value` lines."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def wait(missing: Callable[[], str], timeout: float = PATIENCE) -> None:
    """Wait until nothing is missing; the TimeoutError says what is."""
    deadline = time.monotonic() + timeout
    while said := _said(missing):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{said} (waited {timeout:g} s)")
        time.sleep(0.02)


def _said(missing: Callable[[], str]) -> str:
    try:
        return missing()
    except (*GONE, redis.ResponseError) as error:
        return f"a server does not answer as it should: {error}"


class Group:
    """What all topologies have: a context manager over its `nodes`."""

    def __init__(self, nodes: Iterable[Node], sentinels: Iterable[Node] = (), *, bus: Bus | None = None) -> None:
        self.nodes = list(nodes)
        self.sentinels = list(sentinels)
        self._bus = bus
        self._names = {node: f"peer-{number}" for number, node in enumerate(self._all)}

    @property
    def _all(self) -> list[Node]:
        return [*self.nodes, *self.sentinels]

    def start(self) -> None:
        """Start all servers at once and wait until they agree."""
        if self._bus is not None:
            self._bus.start()
        try:
            with ThreadPoolExecutor(len(self._all)) as pool:
                for started in [pool.submit(node.start) for node in self._all]:
                    started.result()
            self._form()
        except BaseException:
            self.stop()
            raise

    def _form(self) -> None:
        """Make a topology of the servers."""

    def stop(self) -> None:
        """End all servers."""
        for node in self._all:
            node.stop()
        if self._bus is not None:
            self._bus.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # Cutting off

    def _introduce(self) -> None:
        """Give each server a user of its own at all servers, and let it log in as that; a restart keeps both."""
        users = [("ACL", "SETUSER", name, "on", "nopass", "~*", "&*", "+@all") for name in self._names.values()]
        for node, name in self._names.items():
            own: list[tuple[str, ...]] = [
                ("CONFIG", "SET", "masteruser", name), ("CONFIG", "SET", "masterauth", name), ("CONFIG", "REWRITE"),
            ] if node in self.nodes else [
                ("SENTINEL", "CONFIG", "SET", "sentinel-user", name),
                ("SENTINEL", "CONFIG", "SET", "sentinel-pass", name), ("SENTINEL", "FLUSHCONFIG"),
            ]  # fmt: skip
            ask_all(node, [*users, *own])

    def _cut(self, at: Node, whom: Iterable[Node]) -> None:
        for each in whom:
            # A sentinel that may not log in goes on as the default user; one that may do nothing is cut off.
            # A replica that may do nothing would forget where it was; one that may not log in tries again.
            no = "-@all" if each in self.sentinels else "off"
            name = self._names[each]
            ask_all(at, [("ACL", "SETUSER", name, no), ("CLIENT", "KILL", "USER", name)])

    def _mend(self, at: Node, whom: Iterable[Node]) -> None:
        ask_all(at, [("ACL", "SETUSER", self._names[each], "on", "+@all") for each in whom])

    def lag(self, *replicas: Node) -> None:
        """Let nothing that is written from now on reach these replicas, until `catch_up()`. They know of no harm."""
        for replica in replicas:
            for node in self._others(replica):
                self._cut(node, [replica])

    def catch_up(self, *replicas: Node) -> None:
        """Let these replicas follow again, and wait until each that is still a replica has all."""
        for replica in replicas:
            for node in self._others(replica):
                self._mend(node, [replica])
        wait(lambda: self._behind(*replicas))

    def isolate(self, node: Node, *together: Node) -> None:
        """Cut it off from the others, sentinels too; clients still reach it. Those in `together` are on its side."""
        side, others = self._sides(node, *together)
        self._part(side, others)

    def _sides(self, *side: Node) -> tuple[list[Node], list[Node]]:
        return list(side), [each for each in self._all if each not in side]

    def _part(self, side: Sequence[Node], others: Sequence[Node]) -> None:
        for ones, theirs in ((side, others), (others, side)):
            for each in ones:
                if each.running:
                    self._cut(each, theirs)

    def heal(self) -> None:
        """Cut nobody off any more, and let no replica lag; `wait_ok()` waits until all follow. (A restart heals
        what was cut off at that server.)
        """
        if self._bus is not None:
            self._bus.mend()
        for node in self._all:
            if node.running:
                self._mend(node, (each for each in self._all if each is not node))

    def _others(self, node: Node) -> list[Node]:
        return [each for each in self.nodes if each is not node and each.running]

    def _behind(self, *replicas: Node) -> str:
        """What is missing at the first of these replicas that is not up to date."""
        return next((lack for replica in replicas if (lack := self._lack(replica))), "")

    def _lack(self, replica: Node) -> str:
        said = info(replica)
        if said["role"] == "master":
            return ""
        if said["master_link_status"] != "up":
            return f"the link of the replica at port {replica.port} to its primary is down"
        primary = next(node for node in self.nodes if node.public == int(said["master_port"]))
        theirs = info(primary)
        listed = [
            line for name, line in theirs.items() if name.startswith("slave") and f"port={replica.public}," in line
        ]
        if not any("state=online" in line for line in listed):
            return f"the replica at port {replica.port} is not online at its primary"
        lack = int(theirs["master_repl_offset"]) - int(info(replica)["slave_repl_offset"])
        return f"the replica at port {replica.port} is {lack} bytes behind" if lack > 0 else ""
