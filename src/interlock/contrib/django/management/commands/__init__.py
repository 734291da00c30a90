"""Commands by the name of their module."""
