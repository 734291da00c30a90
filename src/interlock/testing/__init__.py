"""Help for tests of this package. `simulate` and `shrink`: see docs/simulator.md. (They need lupa.)"""

from .simulator import Report, Shrunk, shrink, simulate

__all__ = ["Report", "Shrunk", "shrink", "simulate"]
