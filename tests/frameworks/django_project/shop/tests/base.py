"""What the tests of the shop share: another client, which sees what is held."""

import time

from django.conf import settings

import interlock


class Other:
    """For a TestCase: another client of the locks' server, and names that no other test has."""

    def setUp(self):
        super().setUp()
        self.other = interlock.Interlock(settings.INTERLOCK["default"]["URL"])
        self.addCleanup(self.other.close)

    def assert_held(self, name):
        self.assertIsNotNone(self.other.lock(name).inspect().holder, f"{name} is free")

    def assert_free(self, name, within=0.0):
        end = time.monotonic() + within
        while (state := self.other.lock(name).inspect()).holder is not None:
            self.assertLess(time.monotonic(), end, f"{name} is held: {state}")
            time.sleep(0.02)

    def take(self, name):
        """Take the lock from whoever holds it."""
        self.assertTrue(self.other.lock(name).revoke("a test", force=True))


def wait_until(condition, within=20.0):
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
