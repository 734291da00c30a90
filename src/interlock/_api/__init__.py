"""The public API, once: each method in a core class; `interlock.threads` and `interlock.aio` are its two faces."""
