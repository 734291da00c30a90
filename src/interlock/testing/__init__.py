"""For the tests of your own program: a real server that a test may kill, pause and start again.

A test of a job that survives a crash of the server:

    from interlock import Interlock
    from interlock.testing import BreakableServer

    def test_the_nightly_job_survives_a_crash_of_the_server():
        with BreakableServer() as server, Interlock(server.url) as locks:
            ...
            server.kill()
            server.restart()
"""

from .server import BreakableServer

__all__ = ["BreakableServer"]
