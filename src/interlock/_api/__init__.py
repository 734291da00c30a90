"""The cores of the public classes: each method once, as `async def _method`; `interlock.aio` and `.threads` call it.

interlock      the class Interlock;  options: arguments, checked
lease          one grant;  multilease: several as one;  section, scopes: one `with`, and what cancels its task
lock permits multi latch barrier election once synchronized    what a user works with;  named: what these share
functions      what a decorator takes;  naming, run_names: names and keys of calls
threads        what only threads have;  asyncio: what only tasks have;  face: what all public classes share
misuse_errors  errors for a wrong call, with the way out;  misuse_warnings: what may be meant, and is logged
inside         which leases each thread or task is inside of
live           how many Interlocks there are
own_keys       which keys a user's command must not write
"""
