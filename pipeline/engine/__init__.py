"""The engine: rounds that run on the device by themselves while the host reads the one before.

    slots.py       where each slot stands, on the device, and what its policy is
    rounds.py      the device work of a round, from the draft's forward to the next round's start
    restriction.py what rows may be by grammars, from the host in the middle of a round
    histories.py   every slot's tokens, for proposers
    adjusting.py   penalties, biases and bans of every row, on the device
    outbox.py      a round's results on their way to the host
    graphs.py      CUDA graphs of rounds, captured at their second use, the least used given up
    prefills.py    prompts, chunk by chunk beside rounds
    engine.py      the host's loop: what is launched, and what becomes of what comes back
    buckets.py, features.py, memory.py
                   shapes, which parts of a round are in use, how many slots fit

Only `graphs.py` and `memory.py` need CUDA: without graphs the same engine runs on the CPU.
"""

from pipeline.engine.engine import Engine, make_engine
from pipeline.engine.features import why_eager

__all__ = ["Engine", "make_engine", "why_eager"]
