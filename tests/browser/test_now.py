"""The view of all names, beside what really happens."""

from __future__ import annotations

import re

import pytest

from harness.clock import machine_time
from harness.modes import wait_until
from interlock import Interlock

pytestmark = pytest.mark.runs_on("its own servers", modes="threads", starts="servers of valkey-9.1")


@pytest.fixture
def locks(locks_server):
    with Interlock(locks_server.url, label="shop") as made:
        yield made


def test_a_lock_appears_when_it_is_acquired_and_goes_when_it_is_released(page, browser, locks):
    """Within two seconds each: of an idle machine. This one may be busy, so the bound is wider, and the best of three
    tries counts.
    """
    browser.open(page)
    browser.sees("Nobody holds anything")
    took = []
    for i in range(3):
        lease = locks.lock(f"stock:{i}").acquire()
        began = machine_time()
        wait_until(lambda: browser.row(f"stock:{i}"))
        appeared = machine_time() - began
        row = browser.row(f"stock:{i}")
        assert "shop@" in row
        assert "test_now.py" in row
        lease.release()
        began = machine_time()
        wait_until(lambda: browser.row(f"stock:{i}") is None)
        took.append((appeared, machine_time() - began))
    assert min(appeared for appeared, _ in took) < 2.0, took
    assert min(went for _, went in took) < 2.0, took
    browser.sees("Nobody holds anything")
    assert not browser.log()


def test_two_hundred_samples_of_a_busy_lock_never_show_two_holders_or_none(page, browser, program, locks_server):
    text = """
def work():
    while True:
        with locks.lock("busy"):
            time.sleep(random.uniform(0.01, 0.05))
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
"""
    pair = [program(locks_server.url, text, label) for label in ("shop-1", "shop-2")]
    browser.open(page)
    browser.sees("busy", "a second")  # it moves, and somebody has counted
    samples = browser.driver.execute_async_script(
        "const done = arguments[0], found = []; const look = () => {"
        " const rows = [...document.querySelectorAll('tbody tr')];"
        " const row = rows.find((each) => each.querySelector('.name')?.textContent === 'busy');"
        " found.push(row ? row.querySelector('.col-holder').innerText : '');"
        " if (found.length < 200) setTimeout(look, 50); else done(found) }; look()"
    )
    assert len(samples) == 200
    assert all(len(re.findall("shop-[12]@", each)) == 1 and " more" not in each for each in samples), set(samples)
    assert len(set(samples)) > 1
    for each in pair:
        each.kill_all()
    browser.sees("Nobody holds anything")


def test_a_name_full_of_markup_does_no_harm(page, browser, locks):
    hostile = [
        "<img src=x onerror=document.title='harmed'>", "</script><script>alert(1)</script>", "rtl:\u202egnp.exe",
        "🔒👩‍🔧" + "x" * 480, "'\"&amp;{root}", "a/b/../c?d#e%2f", "..",
    ]  # fmt: skip
    leases = [locks.lock(name).acquire() for name in hostile]
    try:
        browser.open(page)
        browser.sees("'\"&amp;{root}", "<img src=x", "</script>", "rtl:\\u202egnp.exe")
        assert browser.run("return document.querySelectorAll('img, main script').length") == 0
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        links = browser.run("return [...document.querySelectorAll('tbody .name')].map((each) => each.href)")
        assert len(links) == len(hostile)
        for link in links:
            browser.open(link)
            browser.sees("Its lease ends at")
            assert browser.run("return document.querySelectorAll('img, main script').length") == 0
        assert browser.driver.title != "harmed"
        assert not browser.log()
    finally:
        for lease in leases:
            lease.release()


def test_a_queue_is_in_order(page, browser, program, locks, locks_server):
    lease = locks.lock("queue").acquire()
    waiters = []
    for i in range(3):  # processes, each after the one before: the server has their order
        waiters.append(
            program(locks_server.url, 'threading.Thread(target=lambda: locks.lock("queue").acquire()).start()', f"q{i}")
        )
        wait_until(lambda i=i: len(locks.lock("queue").inspect().waiters) == i + 1)
    try:
        browser.open(page + "lock/lock/queue")
        browser.sees("Queue (3)", "work.py:4")
        found = browser.run("return [...document.querySelectorAll('.queue li')].map((each) => each.innerText)")
        assert [each[:2] for each in found] == ["q0", "q1", "q2"]
        assert "test_now.py" in browser.text
    finally:
        lease.release()
        for waiter in waiters:
            waiter.kill_all()


def test_a_deadlock_is_drawn_with_the_lines_of_both(page, browser, program, locks_server):
    text = """
def nested(first, second):
    with locks.lock(first):
        while not locks.lock(second).inspect().holder:
            time.sleep(0.02)
        with locks.lock(second):
            pass
threading.Thread(target=nested, args=({}), daemon=True).start()
"""
    pair = [
        program(locks_server.url, text.format(args), label)
        for args, label in (("'a', 'b'", "left"), ("'b', 'a'", "right"))
    ]
    browser.open(page)
    browser.sees("A deadlock of 2 callers", "held by")
    ring = browser.run("return document.querySelector('.ring').innerText")
    assert len(re.findall(r"work\.py:6", ring)) == 2  # where both hold
    assert len(re.findall(r"work\.py:9", ring)) == 2  # where both wait
    assert "left@" in ring
    assert "right@" in ring
    for each in pair:
        each.kill_all()


def test_the_page_says_that_the_server_is_away_and_how_old_the_picture_is(serve, browser):
    from interlock.testing import BreakableServer

    with BreakableServer() as server:
        address, command = serve(server.url)
        with Interlock(server.url, label="shop") as locks:
            lease = locks.lock("kept").acquire()
            browser.open(address)
            browser.sees("kept", "Live")
            server.kill()
            text = browser.sees("No answer from the server", "the picture is", "was true before")
            assert "kept" in text
            assert browser.run("return document.body.classList.contains('stale')")
            server.restart()
            browser.sees("Live")
            command.kill_all()
            browser.sees("Connection lost", "the picture is")
            lease.release()
