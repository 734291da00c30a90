"""Finds the primary: the server that a majority of the sentinels names, or that all answering sentinels name.

A client asks the sentinels for each new connection, so after a failover every broken connection leads to the new
primary. Asking more than one sentinel costs a millisecond. It prevents a sentinel that is cut off together with an old
primary from sending the client to that primary. Sentinels that disagree without a majority name no primary: they will
agree in a moment, or one sentinel is out of date, and the client can't find out which one.

With the primary, the sentinels tell the configuration epoch, which grows with each failover. The epoch distinguishes a
primary that stayed the primary from one that another server replaced for a time (ADR 29).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from interlock._connect.address import Address, NamedPrimary, make_address
from interlock._connect.refusals import connection_error
from interlock._protocol.server import Disconnected
from interlock._protocol.timing import now
from interlock.errors import ConfigError, LockError

SENTINEL_TIMEOUT: Final = 0.5  # seconds that one sentinel may take


@dataclass(frozen=True)
class Sentinels:
    """The sentinels that watch a service."""

    addresses: tuple[Address, ...]
    service: str
    _failed: dict[str, float] = field(default_factory=dict[str, float], init=False, repr=False, compare=False)
    """By sentinel: when it last failed to answer. A sentinel that has answered since is not in here."""

    def primary(self, timeout: float) -> NamedPrimary:
        """The primary, with the highest epoch that a sentinel tells with it. Blocks, for about `timeout` seconds.

        Raises Disconnected if no sentinel answers, or if the sentinels disagree without a majority. Raises ConfigError
        if the sentinels don't know the service, or if all of them refuse for a reason that only the user can correct.
        """
        named: Counter[tuple[str, int]] = Counter()
        epochs: dict[tuple[str, int], int] = {}
        without_service, errors, end = 0, list[Exception](), now() + timeout
        # A sentinel that failed to answer comes last, so a machine that is down costs its share of the time only once.
        order = sorted(self.addresses, key=lambda sentinel: self._failed.get(sentinel.display_url, 0.0))
        for sentinel in order:
            # Each sentinel has a share, so that silent or slow sentinels together do not exceed the caller's time.
            sentinel_timeout = min(SENTINEL_TIMEOUT, timeout / len(order), max(0.001, end - now()))
            try:
                reply, primary = self._ask(
                    sentinel, sentinel_timeout, ("GET-MASTER-ADDR-BY-NAME", self.service), ("MASTER", self.service)
                )
                self._failed.pop(sentinel.display_url, None)
            except (RedisError, OSError) as error:
                self._failed[sentinel.display_url] = now()
                advice = _advice(error, str(error))
                errors.append(
                    ConfigError(f"{_host_port(sentinel)} {advice}") if advice else connection_error(error, sentinel)
                )
                continue
            if reply is None:
                without_service += 1
                continue
            host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in reply)
            each = host, int(port)
            named[each] += 1
            if (epoch := _epoch(primary)) is not None:
                epochs[each] = max(epoch, epochs.get(each, 0))
            if named[each] * 2 > len(self.addresses):
                break
        if len(named) == 1 or any(number * 2 > len(self.addresses) for number in named.values()):
            each = named.most_common(1)[0][0]
            return NamedPrimary(*each, epochs.get(each))
        if named:
            answers = ", ".join(f"{number} say {host}:{port}" for (host, port), number in named.most_common())
            raise Disconnected(f"the sentinels at {self._display} disagree: {answers}", sent=False)
        if without_service:
            raise ConfigError(
                f"no sentinel of {self._display} knows the service {self.service!r}. "
                f"They watch: {self._list_services()}"
            )
        if all(isinstance(error, LockError) for error in errors):
            raise errors[-1]
        cause = next(error for error in errors if not isinstance(error, LockError))
        raise Disconnected(f"none of the sentinels at {self._display} answers: {cause}", sent=False)

    @property
    def _display(self) -> str:
        return ", ".join(map(_host_port, self.addresses))

    def _list_services(self) -> str:
        for sentinel in self.addresses:
            with contextlib.suppress(RedisError, OSError):
                (masters,) = self._ask(sentinel, SENTINEL_TIMEOUT, ("MASTERS",))
                return ", ".join(sorted(master[b"name"].decode() for master in masters)) or "nothing"
        return "unknown services"

    @staticmethod
    def _ask(sentinel: Address, timeout: float, *questions: tuple[str, ...]) -> list[Any]:
        """The replies of a sentinel to questions that travel in one write, so that it learns nothing in between.

        Raises the error for the first question. For a later question that the sentinel refuses, the error stands in
        place of the reply.
        """
        connection = sentinel.connection(2 * timeout)
        try:
            connection.connect()
            connection.send_packed_command(connection.pack_commands([("SENTINEL", *each) for each in questions]))
            replies = [connection.read_response()]
            for _ in questions[1:]:
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    replies.append(error)
            return replies
        finally:
            connection.disconnect()


def _epoch(primary: Any) -> int | None:
    """The configuration epoch in a reply to SENTINEL MASTER; None if the sentinel refuses it."""
    if isinstance(primary, Exception):
        return None
    fields = primary if hasattr(primary, "items") else dict(zip(primary[::2], primary[1::2], strict=True))
    return int(fields[b"config-epoch"])


def _host_port(sentinel: Address) -> str:
    return sentinel.display_url.partition("://")[2].partition("/")[0]


def _advice(error: Exception, text: str) -> str:
    """The advice for an error that only the user can correct; "" for any other error."""
    if "unknown command" in text:
        return "is no sentinel, but a server: name the sentinels, or use redis:// for the server itself"
    if isinstance(error, AuthenticationError) or "must be called with the client already authenticated" in text:
        return f"refuses the login: ?sentinel_password= or ?sentinel_username= is wrong or missing [{text}]"
    if isinstance(error, NoPermissionError):
        return (
            f"forbids it. Give its user the rights +hello +sentinel|get-master-addr-by-name +sentinel|master "
            f"+sentinel|masters [{text}]"
        )
    return ""


def sentinel_address(server: Address, parameters: list[dict[str, Any]], service: str) -> Address:
    """The address of the primary that sentinels name for a service, with the credentials and options of `server`.

    `parameters`: the parameters of a client, for each sentinel.
    """
    sentinels = Sentinels(tuple(make_address(server.kind, sentinel) for sentinel in parameters), service)
    hosts = ",".join(map(_host_port, sentinels.addresses))
    db = server.parameters.get("db", 0)
    scheme = "rediss" if server.kind == "tls" else "redis"
    return replace(server, display_url=f"{scheme}+sentinel://{hosts}/{db}?service={service}", sentinels=sentinels)
