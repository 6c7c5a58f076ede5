"""What is recorded and handed out.

chunk.py         committed tokens side by side with the record of each
audit_record.py  what an audit needs of every token
rollout.py       what a request ends as
rollouts.py      a list of them with what produced them, to Parquet and back
mask_checks.py   what a trainer must refuse in a mask
summary.py       what came of a run, in figures
failures.py      which prompts of a call failed, and why
"""
