"""Where drafts come from.

proposer.py      the contract as an interface, for a method of one's own
ngram.py         prompt lookup
draft_choice.py  what a pipeline's `draft` may be
drawing.py       how a model's drafts are drawn
lengths.py       how many drafts of a request are verified
"""
