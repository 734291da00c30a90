"""Who a server is, by its own words: its process (run_id) and its history of writes (master_replid)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

IDENTITY_LENGTH: Final = 12  # characters of run_id and replid: enough to tell servers apart
NO_REPLID: Final = "0" * 40
IDENTITY_COMMANDS: Final = (("INFO", "server"), ("INFO", "replication"), ("TIME",))
PAST_COMMANDS: Final = (
    ("INFO", "persistence"),
    ("INFO", "keyspace"),
    ("INFO", "stats"),
)  # with which keys a process began


def identity_of(info: dict[str, str]) -> str:
    """The process, and its history of writes, by its INFO."""
    return f"{info.get('run_id', '')[:IDENTITY_LENGTH]}:{info.get('master_replid', '')[:IDENTITY_LENGTH]}"


class Facts(NamedTuple):
    """Who a server is."""

    run_id: str
    replid: str
    replid2: str
    uptime: float
    """Whole seconds, and up to one more than it is: the difference of two rounded times."""
    now_ms: int
    """Its clock."""
    replicas: int
    """How many are connected to it."""
    loaded: bool = False
    """Whether its process began with keys of a snapshot or a log, which may lack the newest."""

    @property
    def identity(self) -> str:
        """The process, and its history of writes."""
        return identity_of({"run_id": self.run_id, "master_replid": self.replid})

    @property
    def promoted(self) -> bool:
        """Whether it was a replica once."""
        return self.replid2 not in ("", NO_REPLID)


def parse_info(info: Any) -> dict[str, str]:
    """The reply to INFO."""
    text: str = info.decode(errors="replace") if isinstance(info, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def parse_facts(server: Any, replication: Any, time: Any, *past: Any) -> Facts | None:
    """What the replies to `IDENTITY_COMMANDS` and `PAST_COMMANDS` tell.

    None if one of the former was refused, or does not tell who the server is.
    """
    if not (isinstance(server, bytes) and isinstance(replication, bytes) and isinstance(time, list)):
        return None
    info = parse_info(server) | parse_info(replication)
    if min(len(info.get("run_id", "")), len(info.get("master_replid", ""))) < IDENTITY_LENGTH:
        return None
    seconds, micros = cast("list[bytes]", time)
    for each in past:
        info |= parse_info(each)
    return Facts(
        info["run_id"],
        info["master_replid"],
        info.get("master_replid2", ""),
        float(info.get("uptime_in_seconds", 0)),
        int(seconds) * 1000 + int(micros) // 1000,
        int(info.get("connected_slaves", 0)),
        _loaded(info, int(seconds)),
    )


def _loaded(info: dict[str, str], clock: int) -> bool:
    """Whether a process began with keys. A replica did not: it loads what its primary sends.

    From 7.0 on a primary that loads a snapshot has a second replid, as if it had been a replica; but it has never
    received anything from a primary. 6.2 does not say what it loaded; but a process that has more keys than it changed,
    and has saved none of the changes, began with some.
    """

    def number(name: str) -> int:
        return int(info.get(name, "0"))

    if info.get("master_replid2", NO_REPLID) != NO_REPLID and info.get("total_net_repl_input_bytes") != "0":
        return False
    if number("aof_enabled") and number("aof_base_size"):
        return True
    if "rdb_last_load_keys_loaded" in info:
        return number("rdb_last_load_keys_loaded") + number("rdb_last_load_keys_expired") > 0
    unsaved = number("rdb_last_save_time") <= clock - number("uptime_in_seconds") + 1
    keys = sum(int(value[5:].partition(",")[0]) for value in info.values() if value.startswith("keys="))
    return unsaved and keys > number("rdb_changes_since_last_save")
