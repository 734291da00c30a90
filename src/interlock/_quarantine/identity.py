"""The identity that a server reports: its process (run_id) and its history of writes (master_replid)."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, cast

from interlock._protocol.info import parse_info

IDENTITY_LENGTH: Final = 12  # characters of run_id and replid: enough to distinguish servers
NO_REPLID: Final = "0" * 40
IDENTITY_COMMANDS: Final = (("INFO", "server"), ("INFO", "replication"), ("TIME",))
# Whether the process began with keys, see `_loaded`.
PAST_COMMANDS: Final = (("INFO", "persistence"), ("INFO", "keyspace"), ("INFO", "stats"))


def identity_of(info: dict[str, str]) -> str:
    """The identity "<run_id>:<master_replid>" of a server, each part shortened, by its INFO."""
    return f"{info.get('run_id', '')[:IDENTITY_LENGTH]}:{info.get('master_replid', '')[:IDENTITY_LENGTH]}"


class Facts(NamedTuple):
    """What a server reports about its process, and when it was asked."""

    run_id: str
    replid: str
    replid2: str
    uptime: float
    """Whole seconds, up to one second too many or too few: the server subtracts two rounded times."""
    now_ms: int
    """The server's clock (ms), rounded up: a quarantine that starts from it must not start too early."""
    replicas: int
    """How many replicas are connected to the server."""
    loaded: bool = False
    """Whether the process began with keys of a snapshot or a log, which may lack the newest keys."""
    sent_at: float = math.inf
    """When the client sent its handshake, by its own clock. It may read the replies much later."""

    @property
    def identity(self) -> str:
        """The identity: the process and the history of writes."""
        return identity_of({"run_id": self.run_id, "master_replid": self.replid})

    @property
    def least_age(self) -> float:
        """The seconds for which the process has certainly run."""
        return max(0.0, self.uptime - 1)

    @property
    def promoted(self) -> bool:
        """Whether the process was a replica once."""
        return self.replid2 not in ("", NO_REPLID)


def parse_facts(server: Any, replication: Any, time: Any, *past: Any) -> Facts | None:
    """The facts in the replies to `IDENTITY_COMMANDS` and `PAST_COMMANDS`.

    None if the server refused one of the `IDENTITY_COMMANDS`, or does not report its identity.
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
        int(seconds) * 1000 + math.ceil(int(micros) / 1000),
        int(info.get("connected_slaves", 0)),
        _loaded(info, int(seconds)),
    )


def is_loading(persistence: Any) -> bool:
    """Whether a server still loads its keys, by its reply to INFO persistence.

    While it loads, the server reports neither how many keys it has loaded nor the size of its log.
    """
    return isinstance(persistence, bytes) and b"\r\nloading:1\r\n" in persistence


def _loaded(info: dict[str, str], clock: int) -> bool:
    """Whether a process began with keys of a snapshot or a log. A replica did not: its keys are from its primary.

    From 7.0 on, a primary that loads a snapshot has a second replid, like a former replica; but such a process has
    never received data from a primary. Version 6.2 does not report how many keys it loaded. There, a process that has
    more keys than changes, and has saved none of the changes, began with keys.
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
