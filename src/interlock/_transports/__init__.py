"""The transports: one for threads, one for asyncio, and the commands and replies that both use."""
