"""What the tests stand on: real servers of every version, alone and in groups, that may be harmed."""
