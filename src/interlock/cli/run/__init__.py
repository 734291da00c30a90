"""`interlock run`: a command under a lease, as flock(1) runs one under the lock of a file."""
