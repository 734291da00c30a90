"""The ports for several servers: a cluster or a quorum answers messages like one server."""
