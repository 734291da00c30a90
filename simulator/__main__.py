"""The simulator from the command line: `python -m simulator --help`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
