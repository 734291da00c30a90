"""The log of long waits, and the lines of code that it names, without a server."""

from __future__ import annotations

import logging

from interlock._client.grant import Attempt
from interlock._client.places import line_of
from interlock._people.long_waits import MAX_LINES, LongWaits
from interlock._protocol.run_to_end import run
from interlock._transports.blocking.runtime import ThreadRuntime
from interlock.primitives.lock import lock_resource


async def nobody_knows(*_):
    return None


def test_the_lines_of_many_locks_come_a_few_at_a_time_and_each_once(caplog):
    caplog.set_level(logging.INFO, "interlock")
    runtime = ThreadRuntime()
    long_waits = LongWaits(runtime, nobody_knows, lambda *_: None, nobody_knows)
    began = runtime.now() - 31
    waiting = [Attempt(lock_resource(f"lock {i}", ""), "t", waits_since=began) for i in range(2 * MAX_LINES + 3)]
    for number in (MAX_LINES, 2 * MAX_LINES, 2 * MAX_LINES + 3, 2 * MAX_LINES + 3):
        run(long_waits.look(waiting, 2.0))
        assert len(caplog.records) == number
    assert len({record.lock for record in caplog.records}) == len(waiting)


def test_a_line_is_of_its_own_file_though_another_has_the_same_code():
    first, second = (compile("pass", file, "exec") for file in ("one.py", "two.py"))
    assert first == second
    assert (line_of((first, 2)), line_of((second, 2))) == ("one.py:1", "two.py:1")
