"""An option in a URL that redis-py does not know, or that needs TLS, is refused, with every scheme."""

from __future__ import annotations

import pytest
import redis

import interlock
import interlock.aio
from interlock import ConfigError
from interlock._connect.target import address_of


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
