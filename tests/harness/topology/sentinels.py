"""A primary, its replicas, and the sentinels that watch them."""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Final

import redis

from harness.servers import Node

from .bus import Bus
from .group import GONE, OVER_TLS, PATIENCE, QUICK, TLS, Group, ask, ask_all, info, tls_query, wait

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SERVICE: Final = "mymaster"
# Since 7.0 a sentinel can be made to look more often. A busy machine must not make it take a rest (tilt).
PERIODS: Final = {"info-period": 500, "ping-period": 200, "ask-period": 200, "publish-period": 300,
                  "tilt-trigger": 10_000, "tilt-period": 1_000}  # fmt: skip
DOWN: Final = {"s_down", "o_down", "disconnected"}  # not "master_down": that is what another one said once


class _Server(Node):
    bus: Bus | None = None
    number = 0

    def _ports(self) -> tuple[int, int]:
        ports = super()._ports()
        if self.bus is not None:
            self.door = self.bus.lead(self.number, ports[self._tls is not None])
            self._config |= {"bind-source-addr": self.bus.source(self.number)}
        return ports


class _Sentinel(Node):
    def _run(self, home: Path, command: Sequence[str | Path], group: int, deadline: float) -> None:
        super()._run(home, [*command[:2], "--sentinel"], group, deadline)


class Sentinels(Group):
    """One primary, its replicas, and sentinels that watch them as the service "mymaster".

        with Sentinels(config={"min-replicas-to-write": "1"}) as group:
            old = group.primary
            group.isolate(old)                    # it still answers its clients
            new = group.wait_for_primary(old)
            group.heal()                          # the sentinels make a replica of it

    `config` is for the primary and the replicas. `down_after` is how long (seconds) a server is silent before a
    sentinel takes it for dead. Replicas have a priority: the sentinels promote them in the order of `replicas` at the
    start, even one that lags (so writes are lost), if its link was cut less than 10 × `down_after` ago. With
    `sentinels=0` nobody promotes but `promote()`. Sentinels of 6.2 look at replicas every 10 s and cannot be told to
    hurry: after one failover the next one takes that long. With `tls` (see Node) all of them speak TLS. With
    `wired=True` (not for 6.2) `isolate(node, silent=True)` leaves the links between primary and replicas open; with
    `clock` a test can set the clocks of the primary and the replicas.
    """

    def __init__(
        self,
        kind: str = "valkey-9.1",
        *,
        replicas: int = 2,
        sentinels: int = 3,
        config: Mapping[str, str] | None = None,
        down_after: float = 0.5,
        tls: TLS | None = None,
        wired: bool = False,
        clock: bool = False,
    ) -> None:
        over = OVER_TLS if tls else {}
        settings = {**QUICK, **over}
        super().__init__(
            [
                _Server(
                    kind,
                    config={**settings, "replica-priority": str(number or 100), **(config or {})},
                    tls=tls,
                    clock=clock,
                )
                for number in range(1 + replicas)
            ],
            [_Sentinel(kind, config=over, tls=tls) for _ in range(sentinels)],
            bus=Bus() if wired else None,
        )
        for number, node in enumerate(self._servers, 1):
            node.bus, node.number = self._bus, number
        self.quorum = sentinels // 2 + 1
        self.down_after = down_after
        self._tls = tls
        self._promoted = self.nodes[0]  # where nobody watches

    @property
    def _servers(self) -> list[_Server]:
        return [node for node in self.nodes if isinstance(node, _Server)]

    def isolate(self, node: Node, *together: Node, silent: bool = False) -> None:
        """See Group. `silent`: what primary and replicas say to each other is lost, and no link of theirs ends."""
        if not silent:
            super().isolate(node, *together)
            return
        assert self._bus is not None, "Sentinels(wired=True)"
        side, others = self._sides(node, *together)
        for one, other in product(self._servers, repeat=2):
            if one in side and other in others:
                self._bus.mute(one.number, other.number)
        self._part(side, [each for each in others if each in self.sentinels])
        self._part([each for each in side if each in self.sentinels], others)

    def _form(self) -> None:
        self._introduce()
        primary, *replicas = self.nodes
        for replica in replicas:
            ask_all(replica, [("REPLICAOF", "127.0.0.1", primary.public), ("CONFIG", "REWRITE")])
        wait(lambda: self._behind(*replicas))  # first: sentinels learn who is there at their first look
        address = ("127.0.0.1", primary.public)
        for sentinel in self.sentinels:
            for name, period in PERIODS.items():
                with contextlib.suppress(redis.ResponseError):  # 6.2 has its own pace
                    ask(sentinel, "SENTINEL", "DEBUG", name, period)
            settings: dict[str, str | int] = {
                "auth-user": self._names[sentinel], "auth-pass": self._names[sentinel],
                "down-after-milliseconds": round(self.down_after * 1000), "failover-timeout": 2000,
            }  # fmt: skip
            monitor = ("SENTINEL", "MONITOR", SERVICE, *address, self.quorum)
            ask_all(sentinel, [monitor, *(("SENTINEL", "SET", SERVICE, *setting) for setting in settings.items())])
        for sentinel in self.sentinels:  # what they would hear from each other through the primary, in a while
            hello = ("127.0.0.1", sentinel.public, ask(sentinel, "SENTINEL", "MYID"), 0, SERVICE, *address, 0)
            for other in self.sentinels:
                if other is not sentinel:
                    ask(other, "PUBLISH", "__sentinel__:hello", ",".join(map(str, hello)))
        self.wait_ok()

    def wait_ok(self, *, timeout: float = PATIENCE) -> None:
        """Wait until the running sentinels agree, and all running replicas have all writes of the primary."""
        wait(self._wrong, timeout)

    def _wrong(self) -> str:
        running = [node for node in self._all if node.running]
        for sentinel in (node for node in self.sentinels if node in running):
            if (flags := _told([ask(sentinel, "SENTINEL", "MASTER", SERVICE)])[0]["flags"]) != "master":
                return f"the sentinel at port {sentinel.port} says of the primary: {flags}"
            known = [
                *_told(ask(sentinel, "SENTINEL", "REPLICAS", SERVICE)),
                *_told(ask(sentinel, "SENTINEL", "SENTINELS", SERVICE)),
            ]
            sound = [each for each in known if not DOWN & set(each["flags"].split(","))]
            if (lack := len(running) - 2 - len(sound)) > 0:
                down = ", ".join(f"port {each['port']} is {each['flags']}" for each in known if each not in sound)
                return f"the sentinel at port {sentinel.port} lacks {lack} of the others: {down or 'never heard of'}"
        if len(named := self._named()) != 1:
            return f"the sentinels name {len(named)} primaries"
        followers = [node for node in self.nodes if node.running and node not in named]
        if stray := next((node for node in followers if info(node)["role"] != "slave"), None):
            return f"the server at port {stray.port} is no replica"
        return self._behind(*followers)

    @property
    def url(self) -> str:
        """Where to connect: all sentinels and the service. Without sentinels, the primary."""
        if not self.sentinels:
            return self.primary.tcp_url
        hosts = ",".join(f"127.0.0.1:{sentinel.public}" for sentinel in self.sentinels)
        trust = tls_query(self._tls).replace("?", "&")
        return f"redi{'ss' if self._tls else 's'}+sentinel://{hosts}/0?service={SERVICE}{trust}"

    @property
    def primary(self) -> Node:
        """The server that most sentinels name now, dead or alive; without sentinels, the one promoted last."""
        named = self._named()
        if not named:
            raise TimeoutError("no sentinel answers")
        return named.most_common(1)[0][0]

    @property
    def replicas(self) -> list[Node]:
        """The servers that run and say that they are replicas."""
        return [node for node in self.nodes if node.running and info(node)["role"] == "slave"]

    def _named(self) -> Counter[Node]:
        named = Counter([] if self.sentinels else [self._promoted])
        for sentinel in self.sentinels:
            if sentinel.running:
                with contextlib.suppress(*GONE):
                    _, port = ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE, within=1)
                    named[self._at(int(port))] += 1
        return named

    def _at(self, port: int) -> Node:
        return next(node for node in self.nodes if node.public == port)

    def wait_for_primary(self, other_than: Node | None = None, *, timeout: float = PATIENCE) -> Node:
        """The primary, once a quorum of sentinels names it, it is not `other_than`, and it takes writes."""

        def missing() -> str:
            for node, votes in self._named().items():
                if node is not other_than and votes >= self.quorum:
                    primary = node.running and info(node)["role"] == "master"
                    return "" if primary else f"the server at port {node.port} is not the primary yet"
            old = f" other than the one at port {other_than.port}" if other_than else ""
            return f"fewer than {self.quorum} sentinels name a primary{old}"

        wait(missing, timeout)
        return self.primary

    def failover(self, *, timeout: float = PATIENCE) -> Node:
        """Let a sentinel promote a replica though the primary is well: the new primary. The last writes may be lost."""
        old = self.primary

        def refused() -> str:
            sentinel = next(each for each in self.sentinels if each.running)
            try:
                ask(sentinel, "SENTINEL", "FAILOVER", SERVICE)
            except redis.ResponseError as error:  # another one is in progress, or it looks for a replica
                return f"the sentinel refuses a failover: {error}"
            return ""

        wait(refused, timeout)
        return self._agreed(old, timeout)

    def handover(self, *, timeout: float = PATIENCE) -> Node:
        """Let the primary hand over with all its writes (FAILOVER): the new primary, once the sentinels know."""
        old = self.primary
        new = min(self.replicas, key=lambda node: int(ask(node, "CONFIG", "GET", "replica-priority")[1]))
        # FAILOVER holds up all who publish, sentinels too: one that takes that for death would promote meanwhile, and
        # the old primary would wait for ever.
        self._set("down-after-milliseconds", 60_000)
        try:
            ask(old, "FAILOVER", "TO", "127.0.0.1", new.public, "TIMEOUT", round(timeout * 1000))
            wait(lambda: "" if info(new)["role"] == "master" else f"port {new.port} has not taken over", timeout)
            wait(lambda: self._behind(old), timeout)
        finally:
            self._set("down-after-milliseconds", round(self.down_after * 1000))
        self._promoted = new
        # Left to themselves they would notice in a while, and might promote another one over its head.
        return self.failover(timeout=timeout) if self.sentinels else new

    def _set(self, name: str, value: int) -> None:
        for sentinel in self.sentinels:
            if sentinel.running:
                ask(sentinel, "SENTINEL", "SET", SERVICE, name, value)

    def _agreed(self, old: Node, timeout: float) -> Node:
        def missing() -> str:
            named = self._named()
            return f"{named[old]} sentinels still name the old primary" if named[old] or not named else ""

        wait(missing, timeout)
        self.wait_ok(timeout=timeout)  # the one that leads is still busy with the replicas, and has no vote for others
        return self.wait_for_primary(old, timeout=timeout)

    def promote(self, replica: Node) -> None:
        """Make this replica the primary, as it is, and let the other replicas follow it. For `sentinels=0`."""
        ask(replica, "REPLICAOF", "NO", "ONE")
        self._promoted = replica
        for other in self.replicas:
            ask(other, "REPLICAOF", "127.0.0.1", replica.public)


def _told(answer: list[list[str]]) -> list[dict[str, str]]:
    """The fields that a sentinel has of several servers."""
    return [dict(zip(each[::2], each[1::2], strict=True)) for each in answer]
