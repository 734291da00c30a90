"""The algorithm: how a lease is acquired, held, renewed and released. No threads, no event loop, no sockets."""
