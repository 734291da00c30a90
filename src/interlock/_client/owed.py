"""What this client gives back, until the server has answered.

Theory. The server may know something of an attempt from its first request until a reply to its release. All that time
the attempt is in one of four places, and the place is its state:

    it asks                      `Waiters.registered`
    its lease is held            `Book`
    it is given back             `Owed`: by a release that somebody waits for or not, or by an undo
    its lease runs out by itself `LeaseEnds.dropped`: it was lost, or dropped without a release

So whoever ends a session (`close()`, the end of a loop, the exit of the process) looks into these four.

Rule. An attempt enters its next place before it leaves the former one: else `close()`, in another thread, could find it
in neither. It leaves this one when the server has answered its release, or must have forgotten it.
"""

from __future__ import annotations

from interlock._client.grant import Attempt


class Owed(dict[str, Attempt]):
    """The attempts that one client gives back, by token."""
