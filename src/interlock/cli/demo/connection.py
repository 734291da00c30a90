"""A bare connection to the server, over which the recipes send their commands as any client does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlock.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["BareConnection", "Execute"]

Execute = Callable[..., Any]  # takes a Redis command, word by word, and returns the reply

_TIMEOUT = 5.0  # seconds within which a server must answer


class BareConnection:
    """A bare connection that sends any command; replies are bytes and numbers. For one thread."""

    def __init__(self, url: str) -> None:
        """Connect. Raises ConfigError for a bad URL, Unavailable if no server answers."""
        from interlock._connect.address import Address  # noqa: PLC0415  # imports redis-py, which --help does without
        from interlock._connect.target import address_of  # noqa: PLC0415

        server_address = address_of(url, for_asyncio=False)
        if not isinstance(server_address, Address):
            raise ConfigError(
                f"{server_address.display_url} is a cluster, but the demo needs a single server: give the URL of one"
            )
        self._address = server_address
        with self._translate_errors():
            self._connection = self._address.connection(_TIMEOUT)  # redis-py does not type its methods
            self._connection.connect()

    def execute(self, *words: str | bytes | float) -> Any:
        """Send a command, word by word, and return the reply."""
        with self._translate_errors():
            self._connection.send_command(*words)
            return self._connection.read_response()

    def transaction(self, *commands: tuple[str | bytes | float, ...]) -> list[Any]:
        """Send commands as one transaction, in one packet, and return their replies."""
        with self._translate_errors():
            words = [("MULTI",), *commands, ("EXEC",)]
            self._connection.send_packed_command(self._connection.pack_commands(words))
            replies: list[list[Any]] = [self._connection.read_response() for _ in words]
            return replies[-1]

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    @contextlib.contextmanager
    def _translate_errors(self) -> Generator[None]:
        import redis  # noqa: PLC0415

        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise Unavailable(f"{self._address.display_url}: {error}") from error
