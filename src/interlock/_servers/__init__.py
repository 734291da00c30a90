"""The servers: one server, a cluster or a quorum, which all answer messages like one server.

Each class implements `Server` of `_protocol/types.py`, and `open.py` chooses the class for an address.
"""
