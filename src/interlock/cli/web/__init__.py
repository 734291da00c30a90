"""`interlock web`: the live page, served alone."""
