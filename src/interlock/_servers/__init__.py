"""What answers the client's messages: one server, or a cluster or a quorum that answers like one server."""
