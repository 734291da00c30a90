"""A bare connection: what recipes speak to the server on, as people's clients do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis

from interlock._connect.address import Address, address
from interlock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Ask", "Wire"]

Ask = Callable[..., Any]  # a Redis command, word by word, and its reply

_ANSWER = 5.0  # seconds within which a server must answer


class Wire:
    """A bare connection, on which any command may be said; replies are bytes and numbers. For one thread."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a bad URL, Unavailable where nobody answers."""
        found = address(url, for_asyncio=False)
        if not isinstance(found, Address):
            raise ConfigError(f"{found.display_url}: one server is needed here, not a cluster")
        self._address = found
        with self._told():
            self._connection = self._address.connection(_ANSWER)  # its methods have no types
            self._connection.connect()

    def ask(self, *words: str | bytes | float) -> Any:
        """Say a command, word by word, and return the reply."""
        with self._told():
            self._connection.send_command(*words)
            return self._connection.read_response()

    def together(self, *commands: tuple[str | bytes | float, ...]) -> list[Any]:
        """Say some commands as one transaction, in one packet, and return their replies."""
        with self._told():
            words = [("MULTI",), *commands, ("EXEC",)]
            self._connection.send_packed_command(self._connection.pack_commands(words))
            replies: list[list[Any]] = [self._connection.read_response() for _ in words]
            return replies[-1]

    def close(self) -> None:
        """Hang up."""
        self._connection.disconnect()

    @contextlib.contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise Unavailable(f"{self._address.display_url}: {error}") from error
