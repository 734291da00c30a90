"""A pair of files for each primitive: the .py names the keys and packs the messages, the .lua decides."""
