"""Every view in light and dark, wide and narrow: accessible, by the keyboard alone, no wider than its window."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from harness.browser import Browser
from interlock import Interlock

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1")
SCENE = """
def forever(work):
    def loop():
        while True:
            work()
    threading.Thread(target=loop, daemon=True).start()

def hold(lockable, least, most):
    with lockable:
        time.sleep(random.uniform(least, most))

def nested(first, second):
    with locks.lock(first):
        while not locks.lock(second).inspect().holder:
            time.sleep(0.02)
        with locks.lock(second):
            pass

threading.Thread(target=nested, args=FIRST, daemon=True, name="pay").start()
for i in range(3):
    forever(lambda: hold(locks.lock("checkout"), 0.02, 0.05))
    forever(lambda: hold(locks.semaphore("payments-api", 4), 0.5, 2))
    forever(lambda: hold(locks.rwlock("catalogue").read(), 1, 4))
forever(lambda: hold(locks.election("scheduler"), 3600, 3600))
forever(lambda: locks.once("nightly", at_most=600).run(lambda lease: time.sleep(3600)))
forever(lambda: locks.barrier("batch", 5).wait())
forever(lambda: locks.latch("warm-up", 4).wait())
forever(lambda: hold(locks.lock("report:2026"), 3600, 3600))
"""
VIEWS = ["", "lock/lock/report:2026", "lock/semaphore/payments-api", "lock/election/scheduler", "lock/once/nightly",
         "lock/barrier/batch", "processes", "audit", "health"]  # fmt: skip
LOOKS = {"light-wide": (False, (1400, 900)), "dark-narrow": (True, (390, 800)), "dark-wide": (True, (1400, 900)),
         "light-narrow": (False, (390, 800))}  # fmt: skip


@pytest.fixture(scope="module")
def scene(program, locks_server):
    """A fleet with something of everything."""
    with contextlib.ExitStack() as stack:
        for label, order in (("shop-1", ("account:7", "stock:42")), ("shop-2", ("stock:42", "account:7"))):
            each = program(locks_server.url, SCENE.replace("FIRST", repr(order)), label)
            stack.callback(each.kill_all)
        with Interlock(locks_server.url) as locks:
            lease = locks.lock("old").acquire()
            locks.lock("old").revoke("its host was replaced", force=True)
            lease.release()
        yield


@pytest.mark.parametrize("look", LOOKS)
def test_each_view_is_accessible_and_as_wide_as_its_window(look, scene, page):
    """The pictures go to $INTERLOCK_PICTURES, for whoever wants to look at them."""
    dark, size = LOOKS[look]
    views = VIEWS if look in {"light-wide", "dark-narrow"} else VIEWS[:2]
    window = Browser(dark=dark, size=size, touch=size[0] < 600)
    try:
        for view in views:
            window.open(page + view)
            window.sees("Live", {"": "A deadlock of 2 callers", "audit": "its host was replaced"}.get(view, "Live"))
            if folder := os.environ.get("INTERLOCK_PICTURES"):
                window.picture(Path(folder, f"{view.replace('/', '-') or 'now'}-{look}.png"))
            assert window.run("return document.documentElement.scrollWidth <= innerWidth"), view
            assert not window.log(), view
            assert not window.axe(), view
    finally:
        window.close()


def test_the_keyboard_alone_reaches_a_name_and_its_queue(scene, page, browser):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    browser.sees("report:2026", "A deadlock of 2 callers")
    ActionChains(browser.driver).send_keys("/").perform()  # to the filter
    ActionChains(browser.driver).send_keys("report:2026").perform()
    browser.sees("1 of ")
    ActionChains(browser.driver).send_keys(Keys.TAB, Keys.ENTER).perform()
    browser.sees("Its lease ends at")
    assert browser.driver.current_url.endswith("/lock/lock/report%3A2026")


def test_every_kind_says_what_it_has(scene, page, browser):
    browser.open(page)
    browser.sees("A deadlock of 2 callers", "payments-api", "scheduler", "nightly")
    assert "of 4 permits" in browser.row("payments-api")
    assert "reader" in browser.row("catalogue")
    assert "term 1" in browser.row("scheduler")
    assert "2 of 5 arrived" in browser.row("batch")
    assert "4 of 4 left" in browser.row("warm-up")
    assert "a second" in browser.row("checkout") or "moves" in browser.row("checkout")
    browser.open(page + "processes")
    browser.sees("2 processes hold something or wait", "interlock 0.1.0", "shop-1@", "shop-2@")
    browser.open(page + "health")
    browser.sees("What the doctor says", "Valkey 9.1")
