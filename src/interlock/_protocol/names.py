"""The checks of names and other values that a user gives, before the client sends anything."""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAME_BYTES: Final = 512  # bytes of a name
CUT_MARK: Final = "%~"  # before the hash of what was cut
CUT_BYTES: Final = len(CUT_MARK) + 32  # the least size of a text that may have to be shortened
MIN_TTL: Final = 0.01  # seconds
_ADDRESS: Final = re.compile(r"<[\w.<>]+ object at 0x[0-9A-Fa-f]+>")
MAX_BITS: Final = 1000  # of an int: a longer one is no float, and Python may refuse to print it


def checked_name(name: object, what: str = "name") -> str:
    """The name, if it is valid. Raises ConfigError, whose text says what is valid. `what`: name, or prefix."""
    if not isinstance(name, str):
        advice = '. To decorate, give a name: @locks.lock("stock")' if callable(name) and what == "name" else ""
        example = "'stock:42'" if what == "name" else "'app:'"
        raise ConfigError(f"a {what} must be a str, such as {example}, not {type(name).__name__}{advice}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(
            f"the {what} {name!r} has half a surrogate pair, which UTF-8 can't encode (a shell's bytes that are no "
            "UTF-8 become such). Remove it"
        ) from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise ConfigError(
            f"a {what} must have 1 to {MAX_NAME_BYTES} bytes in UTF-8; this one has {size}: {name[:40]!r}"
        )
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise ConfigError(f"the {what} {name!r} has a control character. Encode it, as urllib.parse.quote() does")
    return name


def has_address(name: str) -> bool:
    """Whether a name has the repr of an object in it whose class has no repr of its own."""
    return " object at 0x" in name and _ADDRESS.search(name) is not None


def shortened(text: str, most: int) -> str:
    """This text if it has at most `most` bytes; else its beginning, with a hash of the whole in place of the rest."""
    whole = text.encode(errors="surrogatepass")
    if len(whole) <= most or most < CUT_BYTES:
        return text
    return whole[: most - CUT_BYTES].decode(errors="ignore") + CUT_MARK + hashlib.sha256(whole).hexdigest()[:32]


def printable(text: str) -> str:
    """A text of somebody else's, made safe for messages: it can't move a cursor or begin a line."""
    return text if text.isprintable() else repr(text)[1:-1]


@lru_cache(maxsize=4096)
def token_part(text: str, maximum: int = 48) -> str:
    """Any text as one part of a token: without characters that separate parts, and of `maximum` characters at most."""
    return re.sub(r"[^A-Za-z0-9._@-]+", "-", text)[:maximum] or "-"


def keys_of(name: object, prefix: str, companions: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """The checked name, and its key with the companions. Raises ConfigError."""
    checked = checked_name(name)
    key = prefix + checked
    head, tail = tagged(key)
    return checked, (key, *(f"{head}{part}{tail}" for part in companions))


def tagged(key: str) -> tuple[str, str]:
    """The stems of a key's companions, which share the key's slot in a cluster, and with which no name can collide.

    A companion has two pairs of braces and a valid key has one at the most; and the colon keeps the companions
    of `x` (`{x}{queue}`) and of `{x}` (`{x}:{queue}`) apart. Raises ConfigError for braces that are no hash tag.
    """
    opened, closed = key.count("{"), key.count("}")
    if opened == closed == 0:
        return f"{{{key}}}{{", "}"
    if opened == closed == 1 and key.index("{") + 1 < key.index("}"):
        return f"{key}:{{", "}"
    raise ConfigError(
        f"{key!r}: a name may have one pair of braces, with a text between them: the hash tag of a cluster, as in "
        "'stock:{42}'. Remove other braces. Only synchronized() puts arguments of a call into a name: 'cart:{user_id}'"
    )


def duration(value: object, what: str, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """A duration in seconds, from `minimum` to `maximum`. Raises ConfigError, whose text says what is valid."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError(f"{what} must be a number of seconds, not an int of {value.bit_length()} bits")
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        advice = ": give its .total_seconds()" if hasattr(value, "total_seconds") else ""
        raise ConfigError(f"{what} must be a number of seconds, not {value!r}{advice}")
    if what != "timeout" and value == math.inf:
        raise ConfigError(f"{what} must be a finite number of seconds, not inf")
    if not minimum <= value <= maximum:
        bounds = f"at least {minimum:g}" + (f" and at most {maximum:.15g}" if maximum != math.inf else "")
        raise ConfigError(f"{what} must be {bounds} seconds, not {value:.15g}")
    return float(value)


def checked_ttl(ttl: object, max_ttl: float) -> float:
    """A ttl in seconds. Raises ConfigError, whose text says what is valid."""
    seconds = duration(ttl, "ttl", minimum=MIN_TTL)
    if seconds > max_ttl:
        raise ConfigError(
            f"ttl must be at most max_ttl ({max_ttl:g} s), not {seconds:.15g}: long work needs no long ttl, since the "
            "lease is renewed. Interlock(max_ttl=...) in all processes raises the limit, at a price: after a restart "
            "or failover every free name waits max_ttl"
        )
    return seconds


def execute_word(word: object, command: object) -> str | bytes:
    """An argument of a command as the text that redis-py would send. Raises ConfigError for what redis-py refuses."""
    if isinstance(word, str | bytes):
        return word
    if isinstance(word, bytearray):
        return bytes(word)
    if isinstance(word, memoryview):
        return word.tobytes()
    if isinstance(word, int | float) and not isinstance(word, bool):
        return int.__repr__(word) if isinstance(word, int) else float.__repr__(word)  # not that of an enum, or of numpy
    raise ConfigError(
        f"execute({command!r}): an argument must be a str, bytes, int or float, not {type(word).__name__}. "
        "Convert it first, so that the data has the form that you want"
    )


def check_command(command: object, keys: object) -> None:
    """Raise ConfigError unless these can be the command and the keys of an execute()."""
    example = 'execute("SET", "x", 1, keys=["x"])'
    if not isinstance(command, str | bytes):
        raise ConfigError(f"execute(): the command must be a str, as in {example}, not {command!r}")
    if len(words := command.split()) != 1 or len(words[0]) != len(command):
        raise ConfigError(f"execute({command!r}): command and arguments stand one by one, as in {example}")
    if isinstance(keys, str | bytes):
        raise ConfigError(f"execute({command!r}): keys must be a list, as in {example}, not {keys!r}")


def checked_bool(value: object, what: str) -> bool:
    """True or False. Raises ConfigError for anything else."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, not {value!r}")
    return value


def positive_int(value: object, what: str, subject: object, maximum: int) -> int:
    """A whole number from 1 to `maximum`. Raises ConfigError, whose text says what is valid."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum:
        return value
    too_long = isinstance(value, int) and value.bit_length() > MAX_BITS
    given = f"one of {value.bit_length()} bits" if too_long else repr(value)  # type: ignore[attr-defined]
    about = f"{subject}: " if subject else ""
    error = ConfigError(f"{about}{what} must be a whole number from 1 to {maximum}, not {given}")
    error.name = getattr(subject, "name", None)
    raise error
