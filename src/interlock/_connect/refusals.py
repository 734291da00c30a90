"""The error for a failed connection: ConfigError if only the user can correct the cause, else Disconnected."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from interlock._client.error_texts import server_error
from interlock._protocol.server import Disconnected, is_transient
from interlock.errors import ConfigError, LockError

if TYPE_CHECKING:
    from interlock._connect.address import Address


def connection_error(error: Exception, address: Address) -> Exception:
    """The error for a connection that failed with `error`. Its cause is `error`, if the user's own code raised that."""
    # redis-py wraps each error that is no OSError. On a unix socket of asyncio, redis-py 5.0 also wraps server errors.
    while isinstance(wrapped := error.__cause__, Exception) and error.args == (wrapped,):
        error = wrapped
    if isinstance(error, LockError | Disconnected):  # raised by the lookup of the address
        return error
    text, display_url = str(error), address.display_url
    if isinstance(error, ResponseError | AuthenticationError) and (refusal := _refusal(error, text, address)):
        return refusal
    if address.kind == "tls" and (advice := _tls_advice(error)):
        return ConfigError(f"{display_url}: {advice}")
    is_known = isinstance(error, RedisError | OSError)
    cause = text if is_known and text else f"{type(error).__name__}: {text}"
    lost = Disconnected(cause, sent=False, timed_out=isinstance(error, TimeoutError | RedisTimeout))
    lost.__cause__ = None if is_known else error  # of a credential provider, say: its traceback names the line
    return lost


def _refusal(error: Exception, text: str, address: Address) -> LockError | None:
    """The error for a server that refuses to serve this client; None if it may serve the client in a moment."""
    display_url = address.display_url
    if isinstance(error, AuthenticationError) or text.startswith(("WRONGPASS", "NOAUTH", "invalid username")):
        return ConfigError(f"{display_url}: {_login_advice(address)} [{text}]")
    if "unknown command" in text.lower() and "HELLO" in text.upper():
        return ConfigError(
            f"{display_url} has no HELLO: it runs a version before 6.0, or its configuration renames the command. "
            "interlock needs Redis 6.2, Valkey 7.2, or later"
        )
    if isinstance(error, NoPermissionError) or text.startswith("NOPERM"):
        return server_error("the connection", display_url, f"NOPERM {text.removeprefix('NOPERM ')}")
    if "DB index" in text:
        return ConfigError(f"{display_url}: the server has no database of this number. Correct it in the URL [{text}]")
    if "max number of clients" in text:  # in the words of a cluster's node, for which redis-py has no class of its own
        return None
    return None if is_transient(text) else ConfigError(f"{display_url}: the server refuses the connection [{text}]")


def _login_advice(address: Address) -> str:
    """The user that could not log in, and the way out. Quotes no name without a password: it may be a password."""
    given = address.parameters
    if provider := given.get("credential_provider"):
        return (
            f"the server refuses the user name and password that {type(provider).__name__} returned. interlock asks it "
            "for each new connection: it must return what the server accepts now"
        )
    if not given.get("username") and not given.get("password"):
        return "a user name and password are missing. Put them into the URL, redis://user:password@host, or the client"
    user = repr(given.get("username") or "default") if given.get("password") else "the user (without a password)"
    return (
        f"the user name or password of {user} is wrong, or the user is disabled. Correct them in the URL (special "
        "characters percent-encoded) or in the client"
    )


# The connection broke, or another error interrupted the handshake: a later try may succeed.
_TLS_TRANSIENT: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def _tls_advice(error: BaseException | None) -> str | None:
    """The advice for an error of TLS that only the user can correct; None for any other error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the server's certificate is not trusted [{error.verify_message}]. Name the authority that signed it: "
                "?ssl_ca_certs=/path/ca.pem; the host must be one of the certificate's names"
            )
        if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
            return f"a file of ssl_ca_certs, ssl_certfile or ssl_keyfile can't be read [{error}]"
        if isinstance(error, ssl.SSLError) and not isinstance(error, _TLS_TRANSIENT):
            return f"no TLS connection [{error}]. Does that port speak TLS, and are the ssl_ files what they should be?"
        error = error.__cause__ or error.__context__
    return None
