"""The constants of Philox4x32-10 and the purposes of its numbers, for its host and its device form."""

import numpy as np

ACCEPT, DRAW, PROPOSAL, SAMPLE, ACCEPT_BLOCK = range(5)  # purposes; SAMPLE derives seeds

ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEPS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
