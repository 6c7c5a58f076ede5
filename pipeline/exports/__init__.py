"""Rollouts in other systems' layouts, and back.

    datasets    Hugging Face datasets (the extra `datasets`)
    vllm        CSR `SamplingMask(token_ids, offsets)`, and lists of lists as over HTTP
    sglang      the response's `meta_info`
    miles       flat ids and offsets; top-K arrays for score centering
    prime_rl    flat ids and a count a token, 0 for a token without replay
    skyrl       a dense [tokens, top_k] array

The library's own layout is Arrow and Parquet: `Rollouts.to_arrow`, `Rollouts.to_parquet`, the schema in
`pipeline.results.rollouts`. Writing takes a `Rollout`; reading validates every row, names the one that is wrong, and
gives a `SamplingMask` (or `TopLogprobs`). A support is a set: rows that come in another order are sorted, with their
log-probabilities.
"""

from pipeline.exports.datasets import from_dataset, to_dataset
from pipeline.exports.miles import from_miles, from_miles_top, to_miles, to_miles_top
from pipeline.exports.prime_rl import from_prime_rl, to_prime_rl
from pipeline.exports.sglang import from_sglang, to_sglang
from pipeline.exports.skyrl import from_skyrl, to_skyrl
from pipeline.exports.vllm import from_vllm, from_vllm_lists, to_vllm, to_vllm_lists

__all__ = [
    "from_dataset",
    "from_miles",
    "from_miles_top",
    "from_prime_rl",
    "from_sglang",
    "from_skyrl",
    "from_vllm",
    "from_vllm_lists",
    "to_dataset",
    "to_miles",
    "to_miles_top",
    "to_prime_rl",
    "to_sglang",
    "to_skyrl",
    "to_vllm",
    "to_vllm_lists",
]
