"""Planted bugs: whether each net finds what it is there for. `scripts/plants --help` tells more.

plant.py     a planted bug, and the copy of interlock that has it
nets.py      the nets: which command searches a planted copy, and what counts as caught
matrix.py    all plants, each with the nets that must catch it
inside.py    the loops that run inside a planted copy
table.py     the table of docs/testing.md
__main__.py  the command line
"""
