"""What the tests of the frameworks share: processes that a test starts, and that end with it."""
