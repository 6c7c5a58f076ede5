"""Output constrained to a grammar: a JSON schema, a regular expression or EBNF, through xgrammar (extra `grammar`).

grammar.py    what a user asks for, without xgrammar
compiler.py   a grammar against the target's vocabulary
walk.py       where one request stands in its grammar, and what each row of a block may be
"""
