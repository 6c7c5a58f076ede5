"""Who runs the stages.

call.py, intake.py  a call's prompts on their way in, checked, seeded and queued; its rollouts on their way out
stepping.py         rounds, each whole or not at all
stage_runner.py     the ten stages by name, timed and observed
provenance.py       what produced a set of rollouts
operators.py        a model's layers on `gpu`'s kernels
host_threads.py     how many threads the host's kernels run on
"""
