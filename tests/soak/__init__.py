"""All nets for hours, with fresh seeds: `scripts/soak --help` tells more.

turns.py     the commands of each net, and what each has done, read from what it wrote
lanes.py     runs the turns, one lane a core, until the time is over; the table
__main__.py  the command line
"""
