"""`interlock top`: what is held and awaited, live in a terminal."""
