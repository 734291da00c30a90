"""The example, started by its command, and the page, block by block."""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.modes import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/frameworks/fastapi.md"


def test_the_shop_sells_what_it_has_and_no_more(start, server, tmp_path):
    shop = start(
        "-m", "uvicorn", "shop:app", "--workers", "2", "--port", "0", cwd=ROOT / "examples/fastapi",
        env={"INTERLOCK_URL": server.url, "SHOP_STOCK": str(tmp_path / "stock.db")},
    )  # fmt: skip
    url = shop.says(r"running on (http://127.0.0.1:\d+)")[0].split()[-1]
    shop.says("Application startup complete", times=2)
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=url, timeout=60, verify=False, trust_env=False) as http:
        wait_until(lambda: http.get("/stock/apples").json() == 10)
        answers = [*pool.map(http.post, ["/orders/apples", "/orders/pears"] * 12)]
        assert [http.get(f"/stock/{item}").json() for item in ("apples", "pears")] == [0, 0]
    for item in ("apples", "pears"):
        of_item = [each for each in answers if item in str(each.url)]
        assert sorted(each.json() for each in of_item if each.status_code == 200) == list(range(10))
        assert [each.status_code for each in of_item].count(409) == 2
    shop.end()
    assert "Traceback" not in shop.output


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
