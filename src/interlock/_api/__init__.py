"""The cores of the public classes: each method once, as `async def _method`; `interlock.aio` and `.threads` call it."""
