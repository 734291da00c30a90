"""Connections: for threads and for asyncio, and what both say on the wire."""
