"""Drop-in replacements for other locks: the same calls, over interlock.

`recipes` and `threading` need no other library.
"""
