"""`python -m interlock` is the command `interlock`."""

from .cli import main

main()
