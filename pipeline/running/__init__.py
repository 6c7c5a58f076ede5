"""How rounds are run: what the stages share, and who calls them.

call.py, intake.py  a call's prompts on their way in, checked, seeded and queued; its rollouts on their way out
stepping.py         rounds, each whole or not at all
stage_runner.py     the ten stages by name, timed and observed
state.py            the models, their caches, the queue and the batch; the pipeline's options
request.py          one sample on its way
stopping.py         where its output ends
records.py, held.py what the stages hand on, wherever its arrays are
recording.py        the audit record of a block's rows
slot_limit.py       how many slots are in use, fewer after a fault
operators.py        a model's layers on `gpu`'s kernels
host_threads.py     how many threads the host's kernels run on
"""
