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
