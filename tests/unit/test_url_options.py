"""An option in a URL that redis-py does not know, or that needs TLS, is refused, with every scheme."""

from __future__ import annotations

import pytest
import redis

import interlock
import interlock.aio
from interlock import ConfigError
from interlock._connect.target import address_of
from interlock._protocol.retry_for import BY_TIMEOUT


@pytest.fixture(params=[interlock.Interlock, interlock.aio.Interlock], ids=["threads", "asyncio"])
def make(request):
    return request.param


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h/0?ssl_ca_certs=/x", "'ssl_ca_certs' is an option for TLS, .*Use rediss://"),
        ("valkey://h/0?ssl_ca_certs=/x", "Use valkeys://"),
        ("redis://h/0?ssl=true", "'ssl' is an option for TLS, .*Use rediss://"),
        ("redis+sentinel://h/0?service=m&ssl_ca_certs=/x", r"Use rediss\+sentinel://"),
        ("redis+sentinel://h?service=m&ssl_ca_certs=/x", r"Use rediss\+sentinel://"),
        ("redis+cluster://h:1?ssl_certfile=/x", r"Use rediss\+cluster://"),
        ("unix:///s?ssl_ca_certs=/x", "a unix socket has no TLS"),
        ("redis://h?nonsense=1", "'nonsense' is no option"),
        ("redis://h?nonsense", "'nonsense' is no option"),
        ("redis://h?socket_timout=1", "Did you mean 'socket_timeout'"),
        ("rediss://h?nonsense=1", "'nonsense' is no option"),
        ("rediss://h?ssl_nonsense=1", "'ssl_nonsense' is no option for TLS.*ssl_ca_certs"),
        ("unix:///s?nonsense=1", "'nonsense' is no option"),
        ("redis+sentinel://h/0?service=m&nonsense=2", "'nonsense' is no option"),
        ("redis+cluster://h:1?nonsense=1", "'nonsense' is no option"),
        ("embedded://?nonsense=1", "no options"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(make, url, says):
    with pytest.raises(ConfigError, match=says):
        make(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h?max_connections=3&timeout=4&decode_responses=true&protocol=3&health_check_interval=3&db=3",
        "redis://h?socket_timeout=1&socket_connect_timeout=1&retry_on_timeout=true&client_name=a&username=b&password=c",
        "unix:///s?db=1&socket_timeout=3",
        "redis+cluster://h?read_from_replicas=true&socket_timeout=2",
        "redis+sentinel://h?service=m&min_other_sentinels=1&sentinel_username=f&sentinel_password=f&socket_timeout=1",
        "rediss://h?ssl_cert_reqs=none&ssl_ca_certs=/x&socket_timeout=1",
        "rediss+cluster://h?ssl_ca_certs=/x",
        "rediss+sentinel://h?service=m&ssl_ca_certs=/x",
    ],
)
def test_the_options_that_redis_py_knows_are_accepted(make, url):
    assert "h" in repr(make(url)) or "unix" in repr(make(url))


@pytest.mark.parametrize("url", ["redis://:s3?cr3=t3@h/0", "redis://h:1?password=s3@cr3&x=t3", "redis://:s3?cr3@h"])
def test_a_password_that_looks_like_an_option_does_not_appear(make, url):
    with pytest.raises(ConfigError) as caught:
        make(url)
    assert not [part for part in ("s3", "cr3", "t3") if part in str(caught.value)]


def test_a_path_in_an_option_is_no_path_of_the_url():
    found = address_of("rediss+sentinel://h?service=m&ssl_ca_certs=/x", for_asyncio=False)
    assert found.parameters["ssl_ca_certs"] == "/x"


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s"])
def test_a_connection_looks_up_no_version_of_redis_py(url, monkeypatch):
    """It would send none, and the look at the metadata of redis-py takes milliseconds."""

    def look_up():
        raise AssertionError

    monkeypatch.setattr(redis.utils, "get_lib_version", look_up, raising=False)
    assert address_of(url, for_asyncio=False).connection(1.0).driver_info is None
    assert address_of(url, for_asyncio=True).async_connection(1.0).driver_info is None


PLACES = [
    "redis://h/0", "rediss://h", "valkey://h", "unix:///s?db=1", "redis+sentinel://h/0?service=m", "redis+cluster://h",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("text", "means"), [("10", 10.0), ("0.5", 0.5), ("none", None), ("None", None)])
def test_a_url_may_say_retry_for_and_the_argument_wins(make, place, text, means, monkeypatch):
    url = f"{place}{'&' if '?' in place else '?'}retry_for={text}"
    assert make(url).retry_for == means
    assert make(url, retry_for=3).retry_for == 3.0
    assert make(url, retry_for=None).retry_for is None
    assert make(place).retry_for is BY_TIMEOUT
    monkeypatch.setenv("INTERLOCK_URL", url)
    assert make().retry_for == means
    address = address_of(url, for_asyncio=False)
    for server in getattr(address, "seeds", [address]):
        assert "retry_for" not in server.parameters  # redis-py would refuse it


def test_the_urls_of_a_quorum_may_say_it_if_they_agree(make):
    said, silent, other = "redis://a?retry_for=10", "redis://b", "redis://c?retry_for=20"
    assert make.quorum([said, silent, "redis://d?retry_for=10"]).retry_for == 10.0
    assert make.quorum([said, silent, other.replace("20", "10")], retry_for=None).retry_for is None
    with pytest.raises(ConfigError, match=r"differ in retry_for.*Interlock\.quorum\(urls, retry_for=10\)"):
        make.quorum([said, silent, other])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "retry_for must be at least 0.01 seconds, not 0"),
        ("-1", "at least 0.01"),
        ("", "retry_for must be a number of seconds"),
        ("5s", "retry_for must be a number of seconds"),
        ("nan", "retry_for must be a number of seconds"),
        ("inf", "retry_for must be a finite number of seconds"),
    ],
)
def test_a_bad_retry_for_is_refused_with_the_way_out(make, place, text, says):
    with pytest.raises(ConfigError, match=f"{says}.*For no bound: None, or in a URL retry_for=none"):
        make(f"{place}{'&' if '?' in place else '?'}retry_for={text}")
    for value in (0, -1, "5", float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match="retry_for must be .*For no bound: None"):
            make(place, retry_for=value)
        with pytest.raises(ConfigError, match="retry_for must be .*For no bound: None"):
            make.quorum(["redis://h"], retry_for=value)
