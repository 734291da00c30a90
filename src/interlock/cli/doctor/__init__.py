"""`interlock doctor`: looks at the servers, and says what endangers locks there and what to set."""
