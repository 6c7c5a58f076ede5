"""Masks end to end: complete, aligned, and the very numbers that verified each token."""

import itertools
import re

import numpy as np
import pytest

import gpu
from pipeline import SamplingParams
from tests import naive, pipes

PROMPTS = [[1, 2, 3], [40, 41, 42, 43], [200, 5]]
SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "filter_order": order}
    for (temperature, top_k, top_p), order in itertools.product(
        [(1.0, 8, 0.9), (0.6, 50, 0.95), (1.7, 300, 0.5), (1.0, 20, 1.0), (0.3, 320, 0.99), (2.5, 2, 0.7)],
        ["top_k_first", "joint"],
    )
]


class Watch:
    """Keeps every committed row's logits and policy by request, in order, as the verifier had them."""

    def __init__(self, pipe):
        self.rows = {}
        pipe.observe("verify", self.see)

    def see(self, verified):
        width = verified.logits.shape[1]
        for b, request in enumerate(verified.proposal.requests):
            for i in range(verified.verdict.num_committed[b]):
                row = b * width + i
                policy = {
                    "count": int(verified.support.count[row]),
                    "token": int(verified.verdict.tokens[b, i]),
                    "logprob": verified.verdict.logprobs[b, i],
                    "logits": verified.logits[b, i].copy(),
                }
                self.rows.setdefault(request.prompt.index, []).append(policy)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_records_are_the_verifiers_own_numbers_and_the_oracles(setting):
    """12 settings: every committed token's record against the verifier (bitwise) and against float64 (2e-6)."""
    setting = dict(setting)
    order = setting.pop("filter_order")
    pipe = pipes.pipe(block_size=4, filter_order=order)
    pipe.stages["draft"] = pipes.PerfectDrafts()
    watch = Watch(pipe)
    params = SamplingParams(
        **setting, max_new_tokens=14, seed=5, return_sampling_mask=True, sampling_logprobs="support", ignore_eos=True
    )
    rollouts = pipe.generate(PROMPTS, params)
    assert sum(rollout.num_accepted.sum() for rollout in rollouts) > 0
    largest = 0.0
    for rollout in rollouts:
        rows = watch.rows[rollout.prompt_index][: len(rollout.token_ids)]
        assert len(rows) == len(rollout.token_ids) == len(rollout.sampling_mask)
        for i, row in enumerate(rows):
            support, logprobs = rollout.sampling_mask[i], rollout.sampling_mask.row_logprobs(i)
            assert rollout.token_ids[i] == row["token"]
            assert len(support) == row["count"]
            chosen = np.flatnonzero(support == row["token"])
            assert len(chosen) == 1
            assert logprobs[chosen[0]] == rollout.logprobs[i] == row["logprob"]
            oracle = naive.policy(
                row["logits"].astype(np.float64), params.temperature, params.top_k, params.top_p, 0.0, order
            )
            if not oracle.borderline:
                assert support.tolist() == np.flatnonzero(oracle.kept).tolist()
                assert abs(logprobs[chosen[0]] - oracle.logprobs[row["token"]]) <= 2e-6
                l1 = np.abs(np.exp(logprobs.astype(np.float64)) - oracle.probs[support]).sum()
                largest = max(largest, l1)
    assert 0 < largest <= 2e-6


class MaskKit:
    """What every decoding path must give: a mixed batch of greedy and sampled requests, both modes."""

    def make(self):
        raise NotImplementedError

    def params(self, **values):
        return SamplingParams(
            **({"top_k": 12, "top_p": 0.95, "max_new_tokens": 7, "seed": 2, "ignore_eos": True} | values),
            return_sampling_mask=True,
        )

    @pytest.mark.parametrize("mode", ["selected", "support"])
    def test_seven_tokens_seven_masks_seven_logprobs(self, mode):
        each = [self.params(sampling_logprobs=mode), self.params(sampling_logprobs=mode, temperature=0)]
        for rollout in self.make().generate([*PROMPTS[:1], *PROMPTS[:1]], each):
            assert len(rollout.token_ids) == len(rollout.sampling_mask) == len(rollout.logprobs) == 7
            sizes = rollout.sampling_mask.sizes
            assert len(rollout.sampling_mask.logprobs) == (7 if mode == "selected" else sizes.sum())
            assert all(token in row for token, row in zip(rollout.token_ids, rollout.sampling_mask, strict=True))
            assert all((np.diff(row) > 0).all() for row in rollout.sampling_mask)
            if mode == "support":
                for i in range(7):
                    assert abs(np.exp(rollout.sampling_mask.row_logprobs(i).astype(float)).sum() - 1) < 1e-5

    def test_greedy_rows_are_singletons_of_log_probability_zero(self):
        each = [self.params(), self.params(temperature=0), self.params(top_k=1, sampling_logprobs="support")]
        _, cold, single = self.make().generate([PROMPTS[0]] * 3, each)
        for rollout in (cold, single):
            assert rollout.sampling_mask.token_ids.tolist() == rollout.token_ids.tolist()
            assert rollout.sampling_mask.sizes.tolist() == [1] * 7
            assert rollout.sampling_mask.logprobs.tolist() == rollout.logprobs.tolist() == [0.0] * 7

    def test_over_the_cap_is_refused_whole_and_alone(self):
        each = [self.params(), self.params(top_k=40, top_p=1.0), self.params(seed=4)]
        with pytest.warns(UserWarning, match="1 of 3 samples were refused or aborted"):
            rollouts = self.make(max_support=16).generate([PROMPTS[0]] * 3, each)
        # 40 or more: bfloat16 logits tie at the cutoff, and ties are kept.
        assert re.fullmatch(
            r"OVERFLOW: support=4\d, expected at most max_support=16; lower top_k or top_p, or build the pipeline "
            r"with a larger max_support",
            rollouts[1].error,
        )
        assert (rollouts[1].finish_reason, len(rollouts[1].token_ids)) == ("abort", 0)
        assert rollouts[1].sampling_mask is None
        alone = self.make(max_support=16).generate([PROMPTS[0]], each[0])[0]
        assert rollouts[0].token_ids.tolist() == alone.token_ids.tolist()
        assert rollouts[2].ok

    def test_exactly_at_the_cap(self):
        rollout = self.make(max_support=16).generate([PROMPTS[0]], self.params(top_k=16, top_p=1.0))[0]
        assert rollout.sampling_mask.sizes.tolist() == [16] * 7

    def test_top_p_of_one_is_the_identity_beside_filtering_rows(self):
        each = [self.params(top_k=320, top_p=1.0), self.params(top_p=0.3)]
        whole, narrow = self.make().generate([PROMPTS[0]] * 2, each)
        assert whole.sampling_mask.sizes.tolist() == [320] * 7
        assert narrow.sampling_mask.sizes.max() <= 12

    def test_top_logprobs_agree_with_the_mask(self):
        params = self.params(sampling_logprobs="support", top_logprobs=15)
        rollout = self.make().generate([PROMPTS[0]], params)[0]
        for i, row in enumerate(rollout.sampling_mask):
            ids, values = rollout.top_logprobs.ids[i], rollout.top_logprobs.values[i]
            assert (np.diff(values[: len(row)]) <= 0).all()
            assert sorted(ids[: len(row)]) == row.tolist()
            assert (ids[len(row) :] == -1).all()
            assert np.isneginf(values[len(row) :]).all()
            order = np.argsort(ids[: len(row)])
            assert values[: len(row)][order].tolist() == rollout.sampling_mask.row_logprobs(i).tolist()


class TestOrdinary(MaskKit):
    def make(self, **options):
        return pipes.pipe(speculative=False, **options)


class TestBadDraft(MaskKit):
    def make(self, **options):
        return pipes.pipe(**options)


class TestGoodDraft(MaskKit):
    def make(self, **options):
        pipe = pipes.pipe(block_size=8, **options)
        pipe.stages["draft"] = pipes.PerfectDrafts()
        return pipe


class OnCuda(MaskKit):
    dtype = "float32"

    def make(self, **options):
        from model_loaders import load_draft, load_target
        from pipeline import SpeculativePipeline

        target = load_target(pipes.target_folder(), device="cuda", dtype=self.dtype)
        draft = load_draft(str(pipes.draft_folder()), target)
        return SpeculativePipeline(target, draft, max_batch=4, max_length=128, **options)


@pytest.mark.gpu
class TestCudaFloat32(OnCuda):
    def test_the_tokens_are_the_cpus(self):
        params = self.params(max_new_tokens=16)
        on_gpu, on_cpu = (pipe.generate(PROMPTS, params) for pipe in (self.make(), pipes.pipe()))
        for a, b in zip(on_gpu, on_cpu, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.sampling_mask.token_ids.tolist() == b.sampling_mask.token_ids.tolist()


@pytest.mark.gpu
class TestCudaBfloat16(OnCuda):
    dtype = "bfloat16"

    def test_exactly_at_the_cap(self):
        rollout = self.make(max_support=320).generate([PROMPTS[0]], self.params(top_k=16, top_p=1.0))[0]
        assert (rollout.sampling_mask.sizes >= 16).all()


def test_the_token_of_the_prefill_is_captured_like_any_other():
    pipe = pipes.pipe(speculative=False)
    params = SamplingParams(top_k=9, max_new_tokens=1, seed=0, return_sampling_mask=True, sampling_logprobs="support")
    rollout = pipe.generate([PROMPTS[0]], params)[0]
    oracle = naive.policy(pipes.logits_after(PROMPTS[0]), 1.0, 9, 1.0)
    assert rollout.sampling_mask[0].tolist() == np.flatnonzero(oracle.kept).tolist()
    assert np.allclose(rollout.sampling_mask.row_logprobs(0), oracle.logprobs[oracle.kept], atol=1e-5)


def test_unfiltered_top_logprobs_are_of_the_whole_vocabulary():
    params = SamplingParams(temperature=1.4, max_new_tokens=5, seed=0, top_logprobs=32, ignore_eos=True)
    for speculative in (False, True):
        rollout = pipes.pipe(speculative).generate([PROMPTS[0]], params)[0]
        ids = list(PROMPTS[0])
        for i, token in enumerate(rollout.token_ids.tolist()):
            oracle = naive.policy(pipes.logits_after(ids), 1.4, 0, 1.0)
            expected = np.sort(oracle.logprobs)[::-1][:32]
            assert np.allclose(rollout.top_logprobs.values[i], expected, atol=1e-4)
            assert abs(rollout.logprobs[i] - oracle.logprobs[token]) < 1e-4
            ids.append(token)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=["NaN", "+inf", "all -inf"])
@pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
def test_an_invalid_row_ends_its_request_and_no_other(poison, speculative):
    prompt_length = len(PROMPTS[0])

    def spoil(ids, scores):
        if ids.shape[1] == prompt_length + 4:
            if np.isneginf(poison):
                scores[:] = poison
            else:
                scores[0, 17] = poison
        return scores

    kit = SamplingParams(top_k=8, max_new_tokens=9, seed=3, return_sampling_mask=True, ignore_eos=True)
    spoilt = SamplingParams(top_k=8, max_new_tokens=9, seed=3, logits_processors=[spoil])
    pipe = pipes.pipe(speculative, max_batch=2)
    with pytest.warns(UserWarning, match="1 of 4 samples"):
        rollouts = pipe.generate([PROMPTS[0]] * 4, [kit, spoilt, kit, kit])
    assert rollouts[1].error.startswith("INVALID: the policy of output token 4 has NaN, +inf or no finite logit")
    alone = pipes.pipe(speculative).generate([PROMPTS[0]], kit)[0]
    for rollout in (rollouts[0], rollouts[2], rollouts[3]):
        assert rollout.token_ids.tolist() == alone.token_ids.tolist()


def test_nan_from_the_model_leaves_no_trace_in_the_slot():
    """A token whose embedding is NaN fills its row of the cache with NaN; the slot's next request must not see it."""
    from model_loaders import load_draft, load_target
    from pipeline import SpeculativePipeline

    target = load_target(pipes.target_folder(), device="cpu")
    target.model.get_input_embeddings().weight.data[77] = np.nan
    pipe = SpeculativePipeline(target, load_draft(str(pipes.draft_folder()), target), max_batch=1, max_length=128)
    params = SamplingParams(top_k=8, max_new_tokens=9, seed=3, return_sampling_mask=True, logit_bias={77: -np.inf})
    fresh, proposals = pipes.pipe(), ([], [])
    for each, seen in zip((pipe, fresh), proposals, strict=True):
        each.observe("draft", lambda proposal, seen=seen: seen.append(proposal.draft_tokens.tolist()))
    with pytest.warns(UserWarning, match="1 of 2 samples"):
        rollouts = pipe.generate([[77] * 40, PROMPTS[0]], params)
    assert rollouts[0].error.startswith("INVALID: the policy of output token 0")
    expected = fresh.generate([PROMPTS[0]], params)[0]
    assert rollouts[1].token_ids.tolist() == expected.token_ids.tolist()
    assert proposals[0] == proposals[1]


def test_nan_from_an_interrupted_call_leaves_no_trace():
    """The same, when the poisoned request was taken out before it could fail."""
    from model_loaders import load_target
    from pipeline import SpeculativePipeline

    target = load_target(pipes.target_folder(), device="cpu")
    target.model.get_input_embeddings().weight.data[77] = np.nan
    params = SamplingParams(top_k=8, max_new_tokens=9, seed=3, logit_bias={77: -np.inf})
    for stage in ("prefill", "finish"):
        pipe = SpeculativePipeline(target, None, max_batch=1, max_length=128)

        def interrupt(record):
            raise KeyboardInterrupt

        leave = pipe.observe(stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pipe.generate([[77] * 40], params)
        leave()
        rollout = pipe.generate([PROMPTS[0]], params)[0]
        expected = pipes.pipe(speculative=False).generate([PROMPTS[0]], params)[0]
        assert rollout.token_ids.tolist() == expected.token_ids.tolist()


def test_a_draft_outside_the_support_is_never_committed():
    """Drafts whose policy gives them nothing are refused at any coin, 0 included."""

    pipe = pipes.pipe(block_size=8)
    verify = pipe.stages["verify"]
    verify._coins = lambda requests, width, purpose: np.full(
        (len(requests), width), 0.0 if purpose == gpu.ACCEPT else 0.5
    )
    banned = dict.fromkeys(range(300), -np.inf)
    rollout = pipe.generate([PROMPTS[0]], SamplingParams(max_new_tokens=12, logit_bias=banned, seed=0))[0]
    assert (rollout.token_ids >= 300).all()


def test_logits_edited_in_the_adjust_stage_are_what_is_recorded():
    """A user's own stage may change the logits: what is captured is what was sampled from, not the model's."""
    from pipeline.stages import Adjust

    class Flat(Adjust):
        def __call__(self, state, block):
            adjusted = super().__call__(state, block)
            logits = np.zeros_like(adjusted.logits)
            return type(adjusted)(adjusted.proposal, logits)

    pipe = pipes.pipe()
    pipe.stages["adjust"] = Flat()
    params = SamplingParams(max_new_tokens=5, top_k=320, seed=0, return_sampling_mask=True, ignore_eos=True)
    rollout = pipe.generate([PROMPTS[0]], params)[0]
    assert np.allclose(rollout.logprobs, -np.log(320), atol=1e-6)
