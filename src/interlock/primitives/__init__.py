"""A pair of files for each primitive: the .py names the keys and packs the messages, the .lua decides.

To add a primitive, write both files, the rules for a quorum in the .py (see `lock.py`), a core class in `_api/`, and
the class that users see in `aio.py`. docs/internals/architecture.md has the steps.
"""
