"""The algorithm: how a lease is acquired, held, renewed and given back. No threads, no event loop, no sockets."""
