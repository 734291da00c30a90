"""`python -m histories`: what scripts/histories runs."""

import sys

from histories.cli import main

if __name__ == "__main__":
    sys.exit(main())
