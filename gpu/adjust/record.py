"""What penalties and bias read."""

from dataclasses import dataclass

from gpu.arrays import Array


@dataclass(frozen=True)
class History:
    """The tokens seen by each request (CSR), filled by the caller."""

    offsets: Array  # int64 [B+1]
    token_ids: Array  # int32 [nnz]: strictly ascending within a request
    output_counts: Array  # int32 [nnz]: occurrences in the output, 0 for a token of the prompt only
    in_prompt: Array  # bool [nnz]


@dataclass(frozen=True)
class LogitBias:
    """Sparse additive biases (CSR), filled by the caller. -inf forbids a token."""

    offsets: Array  # int64 [B+1]
    token_ids: Array  # int32 [nnz]
    values: Array  # float32 [nnz]: not NaN, not +inf


@dataclass(frozen=True)
class SlotHistory:
    """What slots have seen, a word a token, kept where it grows: on a device, before the host has read it.

    `history_words` makes a slot's words, `count_committed` keeps them up. It has the slots' biases too, and bans the
    tokens that end an output while the output is short: row i is the output's token `generated` + i.
    """

    words: Array  # int32 [B, V]: see gpu/adjust/words.py
    bias: Array  # float32 [B, V], added: not NaN, not +inf; -inf forbids a token
    generated: Array  # int64 [B]: tokens of the output
    min_new_tokens: Array  # int64 [B]: tokens of an output that may end
