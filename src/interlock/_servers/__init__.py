"""One server, a cluster or a quorum, as the client sees it: something that answers messages."""
