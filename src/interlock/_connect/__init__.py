"""What a user names becomes data: an address, a cluster, a quorum."""
