"""Pairs on a device, workloads and comparisons for tests of the engine."""

from __future__ import annotations

import functools

import numpy as np
import torch

from model_loaders import load_draft, load_target
from pipeline import NgramProposer, SamplingParams, SpeculativePipeline
from pipeline.testing.records import TOLERANCE, check_alignment
from pipeline.testing.reference import next_logits, policy
from tests import pipes, tiny_drafts

PROMPTS = [
    [(7 * i + 3 * j + i * j) % 300 for j in range(n)] for i, n in enumerate((3, 17, 5, 40, 9, 2, 11, 26), start=1)
]
WIDE = {"top_k": 40, "top_p": 0.95}
MIXED = [
    SamplingParams(temperature=0, seed=2, max_new_tokens=20, ignore_eos=True),
    SamplingParams(seed=3, n=3, max_new_tokens=30, return_sampling_mask=True, sampling_logprobs="support", **WIDE),
    SamplingParams(seed=4, top_p=0.9, max_new_tokens=12, top_logprobs=5),
    SamplingParams(
        seed=5, top_k=40, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, max_new_tokens=25,
        return_sampling_mask=True,
    ),
    SamplingParams(seed=6, min_new_tokens=10, max_new_tokens=40, logit_bias={3: 4.0, 258: 5.0}),
    SamplingParams(seed=7, max_new_tokens=1, top_logprobs=2),
    SamplingParams(seed=8, max_new_tokens=60, min_p=0.02),
    SamplingParams(seed=9, max_new_tokens=50, stop=["a", "b"], **WIDE),
]  # fmt: skip


@functools.cache
def target(device="cpu", vocab_size=320, dtype="float32"):
    """The tiny random target."""
    if (device, dtype) == ("cpu", "float32"):
        return pipes.target(vocab_size)
    return load_target(pipes.target_folder(vocab_size), device=device, dtype=dtype)


@functools.cache
def draft_folder(kind, vocab_size=320):
    """Of the tiny DFlash draft for "dflash", else of one of `tiny_drafts.KINDS`."""
    if kind == "dflash":
        return str(pipes.draft_folder(vocab_size))
    like = pipes.target(vocab_size)
    folder = f"{pipes.FOLDER.name}/engine-{kind}-{vocab_size}"
    layer_ids = tuple(range(like.num_layers - 1))
    tiny_drafts.write(folder, kind, like, block_size=4, layer_ids=layer_ids, seed=1)
    return folder


@functools.cache
def draft(kind, device="cpu", vocab_size=320, dtype="float32"):
    """None for "ordinary", "ngram", else as `draft_folder`."""
    if kind == "ordinary":
        return None
    if kind == "ngram":
        return NgramProposer(3, min_ngram=1)
    return load_draft(draft_folder(kind, vocab_size), target(device, vocab_size, dtype))


def pipe(kind="dflash", engine="overlapped", device="cpu", vocab_size=320, dtype="float32", **options):
    """A fresh pipeline."""
    options = {"max_batch": 4, "max_length": 128} | options
    pair = target(device, vocab_size, dtype), draft(kind, device, vocab_size, dtype)
    return SpeculativePipeline(*pair, engine=engine, **options)


def check_supports(own, prompts, params):
    """Every support and log-probability of a pipeline's rollouts against the policy of a forward without a cache.

    Returns the rows that were compared.
    """
    compared = 0
    for rollout in own.generate(prompts, params):
        check_alignment(rollout)
        tokens = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
        first = len(rollout.prompt_token_ids)
        for i, support in enumerate(rollout.sampling_mask):
            [logits] = next_logits(own.state.target, [tokens[: first + i]])
            probs, close = policy(logits, params, own.state.options.filter_order)
            if close:
                continue
            wanted = np.flatnonzero(probs)
            assert support.tolist() == wanted.tolist()
            logprobs = rollout.sampling_mask.row_logprobs(i).astype(np.float64)
            assert np.abs(np.exp(logprobs) - probs[wanted]).sum() < TOLERANCE
            compared += 1
    return compared


def assert_same(got, want, exact=False):
    """The same rollouts; log-probabilities bit for bit, or as another batch's matrix products round."""
    tolerance = 0 if exact else 1e-5
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist(), (one.error, other.error)
        for name in ("text", "finish_reason", "error", "num_rounds", "seed", "sample_index"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.num_accepted.tolist() == other.num_accepted.tolist()
        for name in ("logprobs", "sampling_mask", "top_logprobs"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None), name
            parts = ("token_ids", "offsets", "logprobs") if name == "sampling_mask" else ("ids", "values")
            for part in parts if name != "logprobs" and a is not None else ():
                one_part, other_part = getattr(a, part), getattr(b, part)
                if one_part.dtype.kind == "f":
                    np.testing.assert_allclose(one_part, other_part, rtol=0, atol=tolerance, err_msg=f"{name}.{part}")
                else:
                    np.testing.assert_array_equal(one_part, other_part, err_msg=f"{name}.{part}")
            if name == "logprobs" and a is not None:
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def assert_close(got, want):
    """The same tokens; numbers as equal as another order of a matrix product leaves them."""
    for one, other in zip(got, want, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist(), (one.error, other.error)
        assert one.finish_reason == other.finish_reason
        if one.logprobs is not None:
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-3)
        if one.sampling_mask is not None:
            np.testing.assert_array_equal(one.sampling_mask.offsets, other.sampling_mask.offsets)
            np.testing.assert_array_equal(one.sampling_mask.token_ids, other.sampling_mask.token_ids)


def check_new_weights(kind, engine, device="cpu"):
    """New weights of the target, in place: what a draft borrows follows, its own stay, and graphs go on."""

    def fresh():
        own = load_target(pipes.target_folder(), device=device)
        return own, load_draft(draft_folder(kind), own)

    params = SamplingParams(seed=11, max_new_tokens=24, ignore_eos=True, **WIDE)
    own, draft = fresh()
    pipe = SpeculativePipeline(own, draft, engine=engine, max_batch=4, max_length=128)
    for _ in range(2):
        before = pipe.generate(PROMPTS, params)
    captured = [graphs.num_captured for graphs in pipe._engine.graphs] if pipe._engine else []
    private = {name: tensor.clone() for name, tensor in draft.module.state_dict().items()}
    new = {name: tensor.flip(0) for name, tensor in own.model.state_dict().items() if "embed" in name or "head" in name}
    assert len(new) == 2
    pipe.update_target_weights(new)
    after = pipe.generate(PROMPTS, params)
    assert all(torch.equal(tensor, private[name]) for name, tensor in draft.module.state_dict().items())
    assert [r.token_ids.tolist() for r in after] != [r.token_ids.tolist() for r in before]
    if pipe._engine:
        assert [graphs.num_captured for graphs in pipe._engine.graphs] == captured
    own, draft = fresh()
    own.load_weights(new)
    want = SpeculativePipeline(own, draft, engine=engine, max_batch=4, max_length=128).generate(PROMPTS, params)
    assert_same(after, want, exact=True)
