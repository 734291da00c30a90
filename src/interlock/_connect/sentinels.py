"""Finds the primary: the server that a majority of the sentinels names, or that all answering sentinels name.

A client asks the sentinels for each new connection, so after a failover every broken connection leads to the new
primary. Asking more than one sentinel costs a millisecond. It prevents a sentinel that is cut off together with an old
primary from sending the client to that primary. Sentinels that disagree without a majority name no primary: they will
agree in a moment, or one sentinel is out of date, and the client can't find out which one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis.exceptions import AuthenticationError, RedisError

from interlock._connect.address import Address, make_address
from interlock._connect.refusals import connection_error
from interlock._protocol.timing import now
from interlock._protocol.types import Disconnected
from interlock.errors import ConfigError, LockError

SENTINEL_TIMEOUT: Final = 0.5  # seconds that one sentinel may take


@dataclass(frozen=True)
class Sentinels:
    """The sentinels that watch a service."""

    members: tuple[Address, ...]
    service: str
    _failed: dict[str, float] = field(default_factory=dict[str, float], init=False, repr=False, compare=False)
    """By sentinel: when it last failed to answer. A sentinel that has answered since is not in here."""

    def primary(self, within: float) -> tuple[str, int]:
        """Host and port of the primary. Blocks, for about `within` seconds.

        Raises Disconnected if no sentinel answers, or if the sentinels disagree without a majority. Raises ConfigError
        if the sentinels don't know the service, or if all of them refuse for a reason that only the user can correct.
        """
        named: Counter[tuple[str, int]] = Counter()
        strangers, errors, end = 0, list[Exception](), now() + within
        # Ask a sentinel that failed to answer last: a machine that is down then costs its share of the time only once.
        order = sorted(self.members, key=lambda sentinel: self._failed.get(sentinel.display_url, 0.0))
        for sentinel in order:
            # Silent or slow sentinels together take no longer than the caller's time.
            share = min(SENTINEL_TIMEOUT, within / len(order), max(0.001, end - now()))
            try:
                reply = self._ask(sentinel, share, "GET-MASTER-ADDR-BY-NAME", self.service)
                self._failed.pop(sentinel.display_url, None)
            except (RedisError, OSError) as error:
                self._failed[sentinel.display_url] = now()
                advice = _advice(error, str(error))
                errors.append(
                    ConfigError(f"{_place(sentinel)} {advice}") if advice else connection_error(error, sentinel)
                )
                continue
            if reply is None:
                strangers += 1
                continue
            host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in reply)
            named[host, int(port)] += 1
            if named[host, int(port)] * 2 > len(self.members):
                break
        if len(named) == 1 or any(votes * 2 > len(self.members) for votes in named.values()):
            return named.most_common(1)[0][0]
        if named:
            told = ", ".join(f"{votes} say {host}:{port}" for (host, port), votes in named.most_common())
            raise Disconnected(f"the sentinels at {self._display} disagree: {told}", sent=False)
        if strangers:
            raise ConfigError(
                f"no sentinel of {self._display} knows the service {self.service!r}. They watch: {self._services()}"
            )
        if all(isinstance(error, LockError) for error in errors):
            raise errors[-1]
        cause = next(error for error in errors if not isinstance(error, LockError))
        raise Disconnected(f"none of the sentinels at {self._display} answers: {cause}", sent=False)

    @property
    def _display(self) -> str:
        return ", ".join(map(_place, self.members))

    def _services(self) -> str:
        for sentinel in self.members:
            with contextlib.suppress(RedisError, OSError):
                masters = self._ask(sentinel, SENTINEL_TIMEOUT, "MASTERS")
                return ", ".join(sorted(one[b"name"].decode() for one in masters)) or "nothing"
        return "nobody knows what"

    @staticmethod
    def _ask(sentinel: Address, within: float, *words: str) -> Any:
        connection = sentinel.connection(2 * within)
        try:
            connection.connect()
            connection.send_command("SENTINEL", *words)
            return connection.read_response()
        finally:
            connection.disconnect()


def _place(sentinel: Address) -> str:
    return sentinel.display_url.partition("://")[2].partition("/")[0]


def _advice(error: Exception, text: str) -> str:
    """The advice for an error that only the user can correct; "" for any other error."""
    if "unknown command" in text:
        return "is no sentinel, but a server: name the sentinels, or use redis:// for the server itself"
    if isinstance(error, AuthenticationError) or "must be called with the client already authenticated" in text:
        return f"refuses us: ?sentinel_password= (and ?sentinel_username=) are wrong or missing [{text}]"
    return ""


def watched_by(data: Address, each: list[dict[str, Any]], service: str) -> Address:
    """The primary that these sentinels name for a service, with the credentials and options of `data`."""
    sentinels = Sentinels(tuple(make_address(data.kind, one) for one in each), service)
    hosts = ",".join(one.display_url.partition("://")[2].partition("/")[0] for one in sentinels.members)
    db = data.parameters.get("db", 0)
    scheme = "rediss" if data.kind == "tls" else "redis"
    return replace(data, display_url=f"{scheme}+sentinel://{hosts}/{db}?service={service}", sentinels=sentinels)
