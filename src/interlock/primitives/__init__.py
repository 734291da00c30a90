"""A pair of files for each primitive: the .py names the keys and packs the messages, the .lua decides.

To add a primitive, write both files, with the `Kind` in the .py (see `lock.py`) that `kinds.py` lists, a core class in
`_api/`, and the class that users see in `aio.py`. docs/internals/architecture.md has the steps.
"""
