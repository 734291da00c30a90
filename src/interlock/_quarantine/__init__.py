"""Finds out whether a server may have forgotten a lease, and searches for a proof that no lease was lost."""
