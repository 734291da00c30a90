"""The address of a cluster: some of its nodes, from a URL or a client. Each node knows all other nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from interlock._connect.address import Address, make_address
from interlock._connect.clients import check_mode, no_client
from interlock._connect.url_options import check_options
from interlock._connect.urls import address_of_url, check_credentials, without_password
from interlock.errors import ConfigError

if TYPE_CHECKING:
    from interlock._protocol.retry_for import RetryFor

_SCHEMES: Final = {f"{scheme}+cluster": scheme for scheme in ("redis", "rediss", "valkey", "valkeys")}
_EXAMPLE: Final = "Write redis+cluster://user:password@host1:7000,host2:7001"


@dataclass(frozen=True)
class Cluster:
    """The nodes that the client asks for the first map, and the URL that messages display (without the password)."""

    seeds: tuple[Address, ...]
    display_url: str

    @property
    def retry_for(self) -> float:
        """Seconds that the cluster may be away before a call without a timeout raises Unavailable, by default."""
        return self.seeds[0].retry_for

    @property
    def given_retry_for(self) -> RetryFor:
        """As the URL says it."""
        return self.seeds[0].given_retry_for


def cluster_of(target: object, *, for_asyncio: bool) -> Cluster | None:
    """The cluster that a URL or a client names; None if the target names no cluster. Raises ConfigError."""
    if isinstance(target, str):
        return _cluster_of_url(target) if target.partition("://")[0] in _SCHEMES else None
    kind = type(target)
    if "cluster" in f"{kind.__module__}.{kind.__qualname__}".lower():
        return _cluster_of_client(target, for_asyncio=for_asyncio)
    return None


def _cluster_of_url(url: str) -> Cluster:
    scheme, _, rest = url.partition("://")
    display_url = without_password(url)
    place, question, query = rest.partition("?")
    place, _, path = place.partition("/")
    if "@" in path:
        raise ConfigError(
            f"{display_url!r} is no cluster's URL: '@' stands after a '/'. "
            "Percent-encode the special characters of a user name or password"
        )
    if path not in ("", "0"):
        raise ConfigError(f"{display_url!r} is no cluster's URL: a cluster has only the database 0. {_EXAMPLE}")
    check_options(url, _SCHEMES[scheme], display_url, "cluster")
    credentials, at_sign, hosts = place.rpartition("@")
    check_credentials(credentials, display_url)
    if not all(hosts.split(",")):
        raise ConfigError(f"{display_url!r} is no cluster's URL: a host is missing. {_EXAMPLE}")
    try:
        seeds = [
            address_of_url(
                f"{_SCHEMES[scheme]}://{credentials}{at_sign}{host}/0{question}{query}", check_the_options=False
            )
            for host in hosts.split(",")
        ]
    except ConfigError:
        raise ConfigError(
            f"{display_url!r} is no cluster's URL. {_EXAMPLE}, with special characters percent-encoded"
        ) from None
    return _make_cluster(seeds, display_url)


def _cluster_of_client(client: Any, *, for_asyncio: bool) -> Cluster:
    name = f"{type(client).__module__}.{type(client).__qualname__}"
    manager: Any = getattr(client, "nodes_manager", None)
    if manager is None:
        raise no_client(client)
    check_mode(name, asynchronous=".asyncio." in type(client).__module__, for_asyncio=for_asyncio)
    given: dict[str, Any] = getattr(client, "connection_kwargs", None) or manager.connection_kwargs
    kinds = [cls.__name__ for cls in getattr(given.get("connection_class"), "__mro__", ())]
    kind = "tls" if given.get("ssl") or "SSLConnection" in kinds else "tcp"
    nodes = list(manager.startup_nodes.values())
    seeds = [make_address(kind, {**given, "host": node.host, "port": node.port}) for node in nodes]
    hosts = ",".join(seed.display_url.partition("://")[2].removesuffix("/0") for seed in seeds)
    return _make_cluster(seeds, f"redi{'ss' if kind == 'tls' else 's'}+cluster://{hosts}")


def _make_cluster(seeds: list[Address], display_url: str) -> Cluster:
    if any(seed.parameters.get("db") for seed in seeds):
        raise ConfigError(f"{display_url!r}: a cluster has only the database 0. {_EXAMPLE}")
    return Cluster(tuple(replace(seed, clustered=True) for seed in seeds), display_url)
