"""`interlock completion`: words that the shell offers when the user presses Tab."""
