"""For code that locks by another name already: the same calls, over interlock. `recipes` needs nothing installed."""
