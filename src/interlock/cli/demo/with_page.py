"""The flash sale again and again on a server of its own, beside the live page.

python -m interlock.cli.demo.with_page [OPTIONS of `interlock demo`]
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

from interlock.embedded import Server

__all__ = ["main"]


def main() -> None:
    """Serve the page and sell, until Ctrl-C."""
    interlock = [sys.executable, "-m", "interlock"]
    sale = ["demo", "--only", "interlock", "--tickets", "400", "--faults", "none", *sys.argv[1:]]
    with Server() as server, contextlib.suppress(KeyboardInterrupt):
        page = subprocess.Popen([*interlock, "web", "--url", server.url])
        try:
            while page.poll() is None:
                subprocess.run([*interlock, *sale, "--url", server.url], stdout=subprocess.DEVNULL, check=False)
        finally:
            page.terminate()
            page.wait()


if __name__ == "__main__":
    main()
