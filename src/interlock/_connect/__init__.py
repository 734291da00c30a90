"""Turns what the user names into data: an address, a cluster, a quorum."""
