"""Help for tests: of this package, and of what uses it."""
