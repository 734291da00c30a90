"""`interlock quorum`: what the servers of a quorum know of themselves, and what an operator states about them."""
