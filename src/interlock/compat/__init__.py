"""Drop-in replacements for other locks: the same calls, over interlock. `recipes` needs no other library."""
