"""For the tests of your own program: a private server, and faults that your critical sections must survive.

    from interlock import Interlock
    from interlock.testing import BreakableServer, lose_lease

    with BreakableServer() as server, Interlock(server.url) as locks:
        with locks.lock("nightly") as lease:
            lose_lease(lease)
            lease.ensure()  # raises LeaseLost

The page "Testing your own code" of the documentation has more. With pytest there are fixtures, too; without, nothing
here needs pytest.
"""

from .faults import Loss, lose_lease, pause_renewal
from .server import BreakableServer, restart_server, server_down, server_paused

__all__ = [
    "BreakableServer", "Loss", "lose_lease", "pause_renewal", "restart_server", "server_down", "server_paused",
]  # fmt: skip
