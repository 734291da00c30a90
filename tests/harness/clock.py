"""A clock for upper bounds: it counts the seconds in which this machine ran, and not those in which it stood still.

Theory. "Within a second" is a promise of interlock on a machine that runs. A machine that is stopped for seconds, or
has ten times more to do than it has processors, breaks it for everybody, and no test may fail for that. A thread
sleeps for a moment, again and again, and measures how late it is woken: the others are as late.
"""

from __future__ import annotations

import functools
import threading
import time

__all__ = ["machine_time"]

TICK = 0.02  # seconds
USUAL = 0.004  # seconds by which a thread may be late on a machine that runs


class _Clock:
    def __init__(self) -> None:
        self.last = time.monotonic(), 0.0  # the time of the last tick, and the seconds lost until then
        threading.Thread(target=self.measure, name="machine time", daemon=True).start()

    def lost_until(self, now: float) -> float:
        tick, lost = self.last
        late = now - tick - TICK
        return lost + late if late > USUAL else lost

    def measure(self) -> None:
        while True:
            time.sleep(TICK)
            now = time.monotonic()
            self.last = now, self.lost_until(now)


_clock = functools.cache(_Clock)


def machine_time() -> float:
    """Seconds since some moment, without those in which this machine stood still. Of use for differences alone."""
    return time.monotonic() - stood_still()


def stood_still() -> float:
    """For how many seconds this machine has stood still since somebody first asked."""
    return _clock().lost_until(time.monotonic())
