"""What a user's own command must not write: the keys of the very lock under which the server runs the command.

`lease.execute("DEL", "lock:stock:42")` would free the lock under its holder, and the lease would learn of it late.
Theory. Only the server knows which arguments are keys, and this check does not ask the server. So the check takes for
keys what `keys=` names (without `keys=` all arguments), and always the first argument, the key of most commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from interlock._protocol.resource import Resource

# Commands that change no key.
READING: Final = frozenset((
    "GET", "MGET", "STRLEN", "GETRANGE", "SUBSTR", "GETBIT", "BITCOUNT", "BITPOS", "BITFIELD_RO", "LCS", "DIGEST",
    "EXISTS", "TYPE", "TTL", "PTTL", "EXPIRETIME", "PEXPIRETIME", "DUMP", "OBJECT", "MEMORY", "TOUCH", "HGET",
    "HMGET", "HGETALL", "HLEN", "HEXISTS", "HKEYS", "HVALS", "HSTRLEN", "HSCAN", "HRANDFIELD", "ZCARD", "ZSCORE",
    "ZMSCORE", "ZRANK", "ZREVRANK", "ZCOUNT", "ZLEXCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZRANGEBYLEX", "ZREVRANGE",
    "ZREVRANGEBYSCORE", "ZREVRANGEBYLEX", "ZSCAN", "ZRANDMEMBER", "LLEN", "LRANGE", "LINDEX", "LPOS", "SCARD",
    "SISMEMBER", "SMISMEMBER", "SMEMBERS", "SRANDMEMBER", "SSCAN", "SORT_RO", "XLEN", "XRANGE", "XREVRANGE",
    "XINFO", "XPENDING", "XREAD", "PUBLISH", "SPUBLISH", "ECHO", "PING",
))  # fmt: skip


def check_writes_no_own_key(
    resource: Resource, command: str | bytes, words: Sequence[object], keys: Iterable[str | bytes] | None
) -> None:
    """Raise ConfigError if this command may write a key of this lock."""
    name = _bytes_of(command).upper().decode(errors="replace")
    if name in READING:
        return
    own = {key.encode() for key in resource.keys}
    for word in (*(words if keys is None else keys), *words[:1]):
        if (key := _bytes_of(word)) in own:
            raise ConfigError(
                f"{resource}: execute({name!r}): {key.decode()!r} is a key of the lock itself, which only interlock "
                "writes. To give the lock back: lease.release(); to make the lease longer: lease.extend(ttl). Data "
                "needs another key"
                + (". If that is a value, say which arguments are keys: keys=[...]" if keys is None else "")
            )


def _bytes_of(word: object) -> bytes:
    """A word as the server gets it; b"" for what is no text, and so no key of a lock."""
    if isinstance(word, str):
        return word.encode(errors="surrogatepass")
    if isinstance(word, memoryview):
        return word.tobytes()
    return bytes(word) if isinstance(word, bytes | bytearray) else b""
