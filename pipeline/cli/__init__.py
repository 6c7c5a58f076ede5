"""The command line.

command.py    `python -m pipeline generate`
arguments.py  options from a dataclass
"""
