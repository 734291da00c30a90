"""One primitive a pair of files: the .py names the keys and packs the messages, the .lua decides."""
