"""`python -m model.histories`: what scripts/histories runs."""

import sys

from model.histories.cli import main

if __name__ == "__main__":
    sys.exit(main())
