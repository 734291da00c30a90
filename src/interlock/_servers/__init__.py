"""The servers: one server, a cluster or a quorum, which all answer messages like one server.

The contract of each is the protocol `Server` in `_protocol/server.py`.

    single         SingleServer: one server. `_resend_after_noscript` sends a script that the server does not know;
                   PendingCall has a reply that nobody waits for
    cluster        ClusterServer: asks the node of a slot;  slots: the slot of a key
    quorum         QuorumServer: asks all;  quorum_nodes: what it knows of each;  quorum_votes: what the replies mean
    open_server    open_server() makes the server for what the user named: a new class of server is made there

To add a server, follow "Add a server" in docs/internals/architecture.md.
"""
