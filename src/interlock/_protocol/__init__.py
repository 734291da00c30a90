"""The bottom layer: names, times, and the types that client, transports and servers share."""
