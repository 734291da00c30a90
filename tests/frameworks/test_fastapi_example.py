"""The example, started by its command, and the page, block by block."""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import httpx
import pytest

from harness.modes import wait_until
from interlock import Interlock

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/frameworks/fastapi.md"


@pytest.fixture
def open_shop(start, server, tmp_path):
    """Start the example: `open_shop(SHOP_ADMIN=...)` returns its process, and a client of it."""

    def opened(**env):
        shop = start(
            "-m", "uvicorn", "shop:app", "--workers", "2", "--timeout-graceful-shutdown", "5", "--port", "0",
            cwd=ROOT / "examples/fastapi",
            env={"INTERLOCK_URL": server.url, "SHOP_STOCK": str(tmp_path / "stock.db"), "SHOP_ADMIN": "", **env},
        )  # fmt: skip
        url = shop.says(r"running on (http://127.0.0.1:\d+)")[0].split()[-1]
        shop.says("Application startup complete", times=2)
        return shop, httpx.Client(base_url=url, timeout=60, verify=False, trust_env=False)

    return opened


def test_the_shop_sells_what_it_has_and_no_more(open_shop):
    shop, client = open_shop()
    with ThreadPoolExecutor(8) as pool, client as http:
        wait_until(lambda: http.get("/stock/apples").json() == 10)
        answers = [*pool.map(http.post, ["/orders/apples", "/orders/pears"] * 12)]
        assert [http.get(f"/stock/{item}").json() for item in ("apples", "pears")] == [0, 0]
    for item in ("apples", "pears"):
        of_item = [each for each in answers if item in str(each.url)]
        assert sorted(each.json() for each in of_item if each.status_code == 200) == list(range(10))
        assert [each.status_code for each in of_item].count(409) == 2
    shop.end()
    assert "Traceback" not in shop.output


PATHS = ["/locks/", "/locks/feed", "/locks/processes", "/locks/static/main.js"]


def test_the_page_of_the_locks_is_for_the_admin_alone(open_shop, server):
    shop, client = open_shop(SHOP_ADMIN="ann:to:the:till")
    with client as http, Interlock(server.url) as locks, locks.lock("stock:plums"):
        for login in (None, ("ann", ""), ("ann", "to"), ("bob", "to:the:till"), ("", "")):
            for path in PATHS:
                answer = http.get(path, auth=login)
                assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Basic"), (login, path)
                assert "plums" not in answer.text
        http.auth = ("ann", "to:the:till")
        assert [http.get(path).status_code for path in PATHS] == [200] * len(PATHS)
        with http.stream("GET", "/locks/feed", headers={"Accept": "text/event-stream"}) as viewer:
            assert any('"stock:plums"' in line for line in islice(viewer.iter_lines(), 200))
            shop.end(within=60)  # although somebody looks
    shop.says("Application shutdown complete", times=2)


def test_without_an_admin_nobody_sees_the_page(open_shop):
    _, client = open_shop()
    with client as http:
        for login in (None, ("", ""), ("admin", "admin")):
            assert [http.get(path, auth=login).status_code for path in PATHS] == [401] * len(PATHS)


BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_block_of_the_page_runs_and_its_app_starts(number, server, monkeypatch):
    monkeypatch.setenv("INTERLOCK_URL", server.url)
    names = {"__name__": "page"}
    exec(compile(BLOCKS[number].replace('"redis://localhost:6379/0"', repr(server.url)), str(PAGE), "exec"), names)
    if "app" in names:
        with TestClient(names["app"]) as client:
            for path in getattr(names["app"], "openapi", dict)().get("paths", {}):
                method = next(iter(names["app"].openapi()["paths"][path]))
                answer = client.request(method, re.sub(r"\{.*?\}", "7", path))
                assert answer.status_code in {200, 422}, answer.text
