"""Kernels of the sampler, on NumPy or CuPy arrays: filter, verification, capture, penalties, masks, replay, Philox.

adjust_logits    penalties and bias, each row on its own prefix; restrict_logits: only tokens that a bitmask allows
history_words, count_committed
                 a slot's history, a word a token, and what a round adds to it
prompt_lookup    drafts from what followed the last tokens before
select_support   temperature, top-k, top-p, min-p: the kept set of each row
draw_drafts      drafts from a draft's logits, under the policies of their requests
LogitsLaw, dense_law
                 the laws that they were drawn from: by the logits, and written out
verify_chain     which drafts are kept, and the token after them; accept_purpose: by which coins
capture_masks    the supports of what was committed, packed
run_round        filter, verification and capture of a round; on a device in two launches, or five
RoundBuffer      a round's results on the device, copied to pinned memory in one piece
top_logprobs     the k most probable tokens of a row's policy
uniforms         Philox numbers of a seed and a position
advance          where the requests of a batch stand after a round; append_tokens: the tokens that they have
to_host, beside  arrays and records from a device, and to where an array is
array_at, on_stream, release_memory
                 memory and streams of another library
support_log_softmax, support_log_softmax_backward
                 a trainer's logits over recorded supports, and their gradient
row_sums         the sum of each row of CSR entries
turn_heads, swiglu
                 what decoder layers compute between their matrix products
"""

from gpu import kernel_cache  # noqa: F401  first: it drops stale kernels
from gpu.adjust import (
    History,
    LogitBias,
    SlotHistory,
    adjust_logits,
    count_committed,
    history_words,
    restrict_logits,
)
from gpu.capture import Capture, RoundBuffer, capture_masks, pack_masks
from gpu.device.foreign import array_at, on_stream, release_memory
from gpu.layers import swiglu, turn_heads
from gpu.lookup import prompt_lookup
from gpu.moving import beside, to_host
from gpu.progress import DECODING, FIRST, IDLE, Progress, advance, append_tokens
from gpu.proposal import Drawn, LogitsLaw, dense_law, draw_drafts
from gpu.random import ACCEPT, ACCEPT_BLOCK, DRAW, PROPOSAL, philox_4x32, sample_seeds, uniforms
from gpu.replay import row_sums, support_log_softmax, support_log_softmax_backward
from gpu.rounds import run_round
from gpu.status import INVALID, OK, OVERFLOW
from gpu.support import FILTER_ORDERS, Support, select_support
from gpu.top_tokens import MOST_ON_DEVICE as MOST_TOP_ON_DEVICE
from gpu.top_tokens import top_logprobs
from gpu.verification import Verdict, accept_purpose, verify_chain
from gpu.weights import GREEDY_TEMPERATURE, MAX_VOCABULARY

__all__ = [
    "ACCEPT",
    "ACCEPT_BLOCK",
    "DECODING",
    "DRAW",
    "FILTER_ORDERS",
    "FIRST",
    "GREEDY_TEMPERATURE",
    "IDLE",
    "INVALID",
    "MAX_VOCABULARY",
    "MOST_TOP_ON_DEVICE",
    "OK",
    "OVERFLOW",
    "PROPOSAL",
    "Capture",
    "Drawn",
    "History",
    "LogitBias",
    "LogitsLaw",
    "Progress",
    "RoundBuffer",
    "SlotHistory",
    "Support",
    "Verdict",
    "accept_purpose",
    "adjust_logits",
    "advance",
    "append_tokens",
    "array_at",
    "beside",
    "capture_masks",
    "count_committed",
    "dense_law",
    "draw_drafts",
    "history_words",
    "on_stream",
    "pack_masks",
    "philox_4x32",
    "prompt_lookup",
    "release_memory",
    "restrict_logits",
    "row_sums",
    "run_round",
    "sample_seeds",
    "select_support",
    "support_log_softmax",
    "support_log_softmax_backward",
    "swiglu",
    "to_host",
    "top_logprobs",
    "turn_heads",
    "uniforms",
    "verify_chain",
]
