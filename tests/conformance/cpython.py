"""CPython's own tests of locks."""

from __future__ import annotations

import importlib
import sys

from harness.servers import DEBIAN


def lock_tests():
    """Python's `test.lock_tests`, or None. Debian has them in a package of their own, which scripts/test unpacks."""
    library = DEBIAN / "usr/lib/python{}.{}".format(*sys.version_info)
    sys.path.append(str(library))  # behind Python's own: what that has is taken from there
    try:
        package = importlib.import_module("test")
        package.__path__.append(str(library / "test"))
        return importlib.import_module("test.lock_tests")
    except ImportError:
        return None
    finally:
        sys.path.remove(str(library))
