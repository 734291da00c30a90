"""What the tests use: real servers of every version, alone and in groups, processes, proxies, the matrix."""
