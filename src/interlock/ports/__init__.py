"""The only modules that import a client library: how the core's messages reach a server, and come back."""
