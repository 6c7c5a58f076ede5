"""What the stages share.

state.py             the models, their caches, the queue and the batch
request.py           one sample on its way
stopping.py          where its output ends
records.py, held.py  what the stages hand on, wherever its arrays are
recording.py         the audit record of a block's rows
grammar_rows.py      what the rows of a block may be
slot_limit.py        how many slots are in use, fewer after a fault
"""
