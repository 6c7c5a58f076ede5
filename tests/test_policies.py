"""What may adjust a policy, end to end, against the processors of transformers that do the same.

A recorded support, its log-probabilities and the reference are of one row of logits: the verifier's own.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline import NgramProposer, SamplingParams, SpeculativePipeline
from tests import naive, pipes
from tests.strategies import fuzz
from tests.test_masks import PROMPTS, Watch

PATHS = {
    "ordinary": lambda **options: pipes.pipe(False, **options),
    "dflash": pipes.pipe,
    "dspark": lambda **options: pipes.pipe_of_kind("dspark vanilla", **options),
    "ngram": lambda **options: SpeculativePipeline(
        pipes.target(), NgramProposer(3, min_ngram=1), **({"max_batch": 4, "max_length": 128} | options)
    ),
}


def warped(logits, params):
    """The final probabilities by transformers' warpers, in its own order: float64 [V]."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k is not None:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("path", PATHS)
@fuzz
@given(
    temperature=st.sampled_from([0.4, 1.0, 2.5]),
    top_k=st.sampled_from([None, 3, 20, 320]),
    top_p=st.sampled_from([1.0, 0.95, 0.6]),
    min_p=st.sampled_from([0.02, 0.1, 0.5, 0.95]),
    seed=st.integers(0, 2**32),
)
def test_min_p_is_captured_as_transformers_computes_it(path, temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_new_tokens=6, ignore_eos=True,
        return_sampling_mask=True, sampling_logprobs="support",
    )  # fmt: skip
    pipe = PATHS[path](allow_unbounded_support=True)
    watch = Watch(pipe)
    rollout = pipe.generate(PROMPTS[:1], params)[0]
    for i, row in enumerate(watch.rows[0][:6]):
        logits = row["logits"].astype(np.float64)
        if naive.policy(logits, temperature, top_k or 0, top_p, min_p).borderline:
            continue
        probs = warped(logits, params)
        assert rollout.sampling_mask[i].tolist() == np.flatnonzero(probs).tolist()
        recorded = np.exp(rollout.sampling_mask.row_logprobs(i).astype(np.float64))
        assert np.abs(recorded - probs[probs > 0]).sum() < 2e-6


def test_min_p_alone_bounds_a_support():
    """Relative to the largest probability after temperature: hotter rows keep more, and no top_k is needed."""
    pipe = pipes.pipe(allow_unbounded_support=True)
    sizes = []
    for temperature in (0.3, 1.0, 3.0):
        params = SamplingParams(temperature=temperature, min_p=0.2, seed=1, max_new_tokens=8, return_sampling_mask=True)
        sizes.append(pipe.generate(PROMPTS[:1], params)[0].sampling_mask.sizes.mean())
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


@pytest.mark.parametrize("path", PATHS)
def test_top_p_without_a_top_k(path):
    """Complete where the support fits max_support, OVERFLOW where it doesn't, and nothing in between."""
    kept = refused = 0
    for top_p in (0.5, 0.9, 0.99):
        params = SamplingParams(
            top_p=top_p, seed=2, max_new_tokens=8, ignore_eos=True, return_sampling_mask=True
        )  # fmt: skip
        whole = PATHS[path](allow_unbounded_support=True)
        watch = Watch(whole)
        rollout = whole.generate(PROMPTS[:1], params)[0]
        for i, row in enumerate(watch.rows[0][:8]):
            probs = warped(row["logits"], params)
            if not naive.policy(row["logits"].astype(np.float64), 1.0, 0, top_p).borderline:
                assert rollout.sampling_mask[i].tolist() == np.flatnonzero(probs).tolist()
        most = int(rollout.sampling_mask.sizes.max())
        for cap in (most, most - 1):
            with warnings.catch_warnings(record=True):
                capped = PATHS[path](allow_unbounded_support=True, max_support=cap).generate(PROMPTS[:1], params)[0]
            if cap == most:
                assert capped.sampling_mask.token_ids.tolist() == rollout.sampling_mask.token_ids.tolist()
                kept += 1
            else:
                assert capped.error.startswith(f"OVERFLOW: support={most}, expected at most max_support={cap}")
                refused += 1
    assert kept == refused == 3


PROMPT_LENGTH = len(PROMPTS[0])
EOS = sorted(pipes.target().eos_token_ids)
REFERENCES = {
    "repetition_penalty": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "logit_bias": (
        {"logit_bias": {7: 2.5, 9: -1.5}},
        [SequenceBiasLogitsProcessor({(7,): 2.5, (9,): -1.5})],
    ),
    "a banned token": (
        {"logit_bias": dict.fromkeys(range(40), -np.inf)},
        [SuppressTokensLogitsProcessor(list(range(40)), device="cpu")],
    ),
    "min_new_tokens": (
        {"min_new_tokens": 6, "ignore_eos": False},
        [MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 6, EOS, device="cpu")],
    ),
    "several": (
        {"repetition_penalty": 1.3, "logit_bias": {7: 2.5}, "min_new_tokens": 6, "ignore_eos": False},
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            SequenceBiasLogitsProcessor({(7,): 2.5}),
            MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, 6, EOS, device="cpu"),
        ],
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("reference", REFERENCES)
def test_parameters_do_what_transformers_processors_do(reference, path):
    """The same seeds give the same tokens, supports and log-probabilities, bit for bit, whoever adjusts the rows."""
    values, processors = REFERENCES[reference]
    common = {
        "temperature": 1.2, "top_k": 30, "min_p": 0.01, "max_new_tokens": 12, "seed": 3, "n": 3, "ignore_eos": True,
        "return_sampling_mask": True, "sampling_logprobs": "support",
    }  # fmt: skip
    ours = SamplingParams(**(common | values))
    theirs = SamplingParams(**(common | {"ignore_eos": values.get("ignore_eos", True)}), logits_processors=processors)
    pipe = PATHS[path]()
    for a, b in zip(pipe.generate(PROMPTS[:1], ours), pipe.generate(PROMPTS[:1], theirs), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.sampling_mask.token_ids.tolist() == b.sampling_mask.token_ids.tolist()
        np.testing.assert_array_equal(a.sampling_mask.logprobs, b.sampling_mask.logprobs)
