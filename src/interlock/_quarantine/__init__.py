"""Whether a server may have forgotten a lease, and what proves that it has not."""
