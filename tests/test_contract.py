"""What can't be served exactly is refused, by itself and with its reason."""

import numpy as np
import pytest
import torch

from pipeline import InvalidRequest, SamplingParams, SpeculativePipeline
from pipeline.stages import Verify
from tests import pipes

MASKED = {"top_k": 8, "return_sampling_mask": True, "max_new_tokens": 3, "seed": 1}


def refusal(pipe, **values):
    with pytest.raises(InvalidRequest) as refused:
        pipe.submit([1, 2, 3], SamplingParams(**(MASKED | values)))
    return str(refused.value)


class WithoutContract:
    """A speculative method that generates but promises nothing about its drafts."""

    method = "guess"
    mask_contract = False

    def __init__(self):
        self.inner = pipes.draft()

    def __getattr__(self, name):
        return getattr(self.inner, name)


class GreedyOnly(WithoutContract):
    mask_contract = True
    sampling_verify_available = False


class Simulated(Verify):
    preserves_law = False


def pipeline_with(draft, **options):
    from pipeline import SpeculativePipeline

    return SpeculativePipeline(pipes.target(), draft, max_batch=4, max_length=64, **options)


def test_a_method_without_the_contract_generates_but_is_not_captured():
    pipe = pipeline_with(WithoutContract())
    assert not pipe.capabilities.mask_contract
    assert not pipe.capabilities.masks_available
    assert refusal(pipe) == (
        "return_sampling_mask=True, expected False: the draft method 'guess' doesn't implement the sampling-mask "
        "contract; use a draft that does, or draft=None"
    )
    assert pipe.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, seed=0))[0].ok


def test_thresholds_other_than_one():
    pipe = pipes.pipe()
    pipe.set_accept_thresholds(single=1.0, acc=0.8)
    assert refusal(pipe) == (
        "return_sampling_mask=True, expected False while the acceptance thresholds are single=1.0 and acc=0.8: only "
        "1.0 is exact; call set_accept_thresholds(1.0, 1.0)"
    )
    pipe.set_accept_thresholds(1.0, 1.0)
    pipe.submit([1, 2, 3], SamplingParams(**MASKED))
    message = (
        "single=0.5, acc=1.0, expected no change while 1 mask requests are queued or running; let them finish first"
    )
    with pytest.raises(InvalidRequest) as refused:
        pipe.set_accept_thresholds(single=0.5)
    assert str(refused.value) == message
    pipe.step()
    with pytest.raises(InvalidRequest, match="1 mask requests are queued or running"):
        pipe.set_accept_thresholds(single=0.5)
    assert all(rollout.ok for rollout in pipe.stream())
    pipe.set_accept_thresholds(single=0.5)


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (1.1, 1), (1, float("nan")), ("1", 1), (True, 1)])
def test_thresholds_out_of_range(values):
    with pytest.raises(InvalidRequest, match=r"expected a number above 0 and at most 1 \(1: exact\)"):
        pipes.pipe().set_accept_thresholds(*values)


def test_thresholds_change_the_law_as_defined():
    """With acc = 1e-6 every draft of the target's support is accepted; the target-only rule would refuse some."""
    pipe = pipes.pipe(block_size=8)
    params = SamplingParams(max_new_tokens=40, seed=0, ignore_eos=True)
    exact = pipe.generate([[1, 2, 3]], params)[0]
    pipe.set_accept_thresholds(acc=1e-9)
    loose = pipe.generate([[1, 2, 3]], params)[0]
    assert loose.num_accepted.sum() > exact.num_accepted.sum()
    assert loose.num_rounds == 1 + int(np.ceil(39 / 8))


def test_simulated_acceptance():
    pipe = pipes.pipe()
    pipe.stages["verify"] = Simulated()
    assert refusal(pipe) == (
        "return_sampling_mask=True, expected False: the verify stage simulates acceptance or doesn't keep the target's "
        "law; put the library's own verify stage back"
    )
    pipe.stages["verify"] = lambda state, adjusted: Verify()(state, adjusted)
    assert "doesn't keep the target's law" in refusal(pipe)


def test_a_stage_replaced_while_a_mask_request_runs():
    pipe = pipes.pipe()
    pipe.submit([1, 2, 3], SamplingParams(**(MASKED | {"max_new_tokens": 20})))
    pipe.submit([1, 2, 3], SamplingParams(max_new_tokens=20, seed=0, ignore_eos=True))
    pipe.step()
    pipe.stages["verify"] = Simulated()
    masked, plain = sorted(pipe.stream(), key=lambda rollout: rollout.prompt_index)
    assert "doesn't keep the target's law" in masked.error
    assert masked.sampling_mask is None
    assert plain.ok


def test_updated_weights():
    from model_loaders import CheckpointError, load_target
    from pipeline import SpeculativePipeline

    pipe = SpeculativePipeline(load_target(pipes.target_folder(), device="cpu"), max_length=64)
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    before = pipe.generate([[1, 2, 3]], params)
    head = "lm_head.weight"
    new = {head: pipe.state.target.model.state_dict()[head].flip(0).clone()}
    ticket = pipe.submit([1, 2, 3], params)
    pipe.step()
    with pytest.raises(InvalidRequest, match="1 requests are waiting or running, expected none while weights change"):
        pipe.update_target_weights(new)
    with pytest.raises(CheckpointError, match="nonsense"):
        pipe.update_target_weights({"nonsense": new[head]}, abort=True)
    with pytest.raises(InvalidRequest, match=r"^tensors=Tensor, expected a mapping of names to tensors: pass model"):
        pipe.update_target_weights(new[head])
    pipe.update_target_weights(new, abort=True)
    aborted = list(pipe.stream())
    assert [(r.prompt_index, r.error) for r in aborted] == [(ticket, "aborted: the target's weights were updated")]
    after = pipe.generate([[1, 2, 3]], params)
    assert after[0].token_ids[0] == 319 - before[0].token_ids[0]
    assert after.provenance["target"]["num_weight_updates"] == 1
    assert before.provenance["target"]["num_weight_updates"] == 0


def test_unbounded_top_k():
    message = (
        "top_k=None, expected a finite top_k for a mask; set one, or build the pipeline with "
        "allow_unbounded_support=True (then bounded by max_support=4096)"
    )
    assert refusal(pipes.pipe(), top_k=None) == message
    assert refusal(pipes.pipe(speculative=False), top_k=None) == message
    allowed = pipes.pipe(allow_unbounded_support=True)
    rollout = allowed.generate([[1, 2]], SamplingParams(**(MASKED | {"top_k": None})))[0]
    assert rollout.sampling_mask.sizes.tolist() == [320] * len(rollout.token_ids)
    greedy = pipes.pipe().generate([[1, 2]], SamplingParams(**(MASKED | {"top_k": None, "temperature": 0})))[0]
    assert greedy.sampling_mask.sizes.tolist() == [1] * len(greedy.token_ids)


def test_no_silent_greedy_fallback():
    pipe = pipeline_with(GreedyOnly())
    assert not pipe.capabilities.sampling_verify_available
    expected = (
        "temperature=1.0, expected 0: the draft method 'guess' can only be verified greedily; use temperature=0, "
        "another draft, or draft=None"
    )
    assert refusal(pipe) == expected
    assert refusal(pipe, return_sampling_mask=False) == expected
    assert pipe.generate([[1, 2]], SamplingParams(temperature=0, max_new_tokens=3))[0].ok


PROMPTS = [
    ([], "prompt=[], expected at least one token"),
    ([1, 320], "prompt token=320, expected ids in [0, 320)"),
    ([-1], "prompt token=-1, expected ids in [0, 320)"),
    ([2**40], f"prompt token={2**40}, expected a token id"),
    (
        [1] * 128,
        "prompt length=128, expected less than max_length=128; shorten the prompt or build the pipeline with a "
        "larger max_length",
    ),
    (3, "prompt=3, expected a string, a list of chat messages or a list of token ids"),
    (np.array([[1, 2]]), "prompt=array([[1, 2]]), expected a string, a list of chat messages or a list of token ids"),
    (np.array(5), "prompt=array(5), expected a string, a list of chat messages or a list of token ids"),
    ([torch.tensor(1.7)], "prompt=[tensor(1.7000)], expected a string, a list of chat messages or a list of token ids"),
    ([[1], [2]], "prompt=[[1], [2]], expected a string, a list of chat messages or a list of token ids"),
    ([1.5], "prompt=[1.5], expected a string, a list of chat messages or a list of token ids"),
    (b"bytes", "prompt=b'bytes', expected a string, a list of chat messages or a list of token ids"),
    ([{"content": "no role"}], "prompt=[{'content': 'no role'}], expected a role in every chat message"),
    ("\ud800", "prompt='\\ud800', expected one that the tokenizer takes"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[message.split(",")[0][:30] for _, message in PROMPTS])
def test_prompts(prompt, message):
    with pytest.raises(InvalidRequest) as refused:
        pipes.pipe().submit(prompt)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {320: 1.0}}, "logit_bias token=320, expected ids in [0, 320)"),
        ({"stop_token_ids": [5, 400]}, "stop_token_ids token=400, expected ids in [0, 320)"),
        ({"top_logprobs": 321}, "top_logprobs=321, expected at most the vocabulary, 320"),
    ],
)
def test_ids_beyond_the_vocabulary(values, message):
    assert refusal(pipes.pipe(), **values) == message


def test_text_without_a_tokenizer():
    from model_loaders import load_target
    from pipeline import SpeculativePipeline

    pipe = SpeculativePipeline(load_target(pipes.target_folder(64, tokenizer=False), device="cpu"))
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with pytest.raises(InvalidRequest, match="expected token ids: the target has no tokenizer"):
            pipe.submit(prompt)
    with pytest.raises(InvalidRequest, match="expected no stop strings: the target has no tokenizer"):
        pipe.submit([1, 2], SamplingParams(stop="x"))
    assert pipe.generate([[1, 2]], SamplingParams(max_new_tokens=3))[0].text == ""


def test_one_bad_request_refuses_itself_only():
    pipe = pipes.pipe()
    good = SamplingParams(**MASKED)
    prompts = [[1, 2, 3], [1, 999], [4, 5], [7]]
    params = [good, good, SamplingParams(**(MASKED | {"top_k": None, "n": 2})), good]
    named = "3 of 5 samples were refused or aborted:\nprompt 1: prompt token=.*\nprompt 2: "
    with pytest.warns(UserWarning, match=named):
        rollouts = pipe.generate(prompts, params)
    assert [r.prompt_index for r in rollouts] == [0, 1, 2, 2, 3]
    assert [r.ok for r in rollouts] == [True, False, False, False, True]
    assert rollouts.failed == [rollouts[1], rollouts[2], rollouts[3]]
    for rollout in rollouts.failed:
        assert rollout.finish_reason == "abort"
        assert len(rollout.token_ids) == 0
        assert rollout.sampling_mask is None
    alone = pipes.pipe().generate([prompts[0], prompts[3]], good)
    assert alone[0].token_ids.tolist() == rollouts[0].token_ids.tolist()
    assert alone[1].token_ids.tolist() == rollouts[4].token_ids.tolist()


def test_calls_that_make_no_sense():
    pipe = pipes.pipe()
    with pytest.raises(InvalidRequest, match="prompts='hello', expected a list of prompts"):
        pipe.generate("hello")
    with pytest.raises(InvalidRequest, match="1 params for 2 prompts, expected one for all or one each"):
        pipe.generate([[1], [2]], [SamplingParams()])
    for params in (3, [3]):
        with pytest.raises(InvalidRequest, match="params=3, expected SamplingParams"):
            pipe.generate([[1]], params)
    with pytest.raises(InvalidRequest, match="stage='sample', expected one of admit, prefill"):
        pipe.observe("sample", print)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0, expected an integer of at least 1"),
        (
            {"slots": 3},
            "slots=3, expected an option of the pipeline: one of max_batch, max_length, filter_order, max_support, "
            "allow_unbounded_support, prefill_chunk, proposal, draft_lengths, engine, compile",
        ),
        ({"max_bach": 3}, "max_bach=3, expected an option of the pipeline; did you mean max_batch?"),
        (
            {"temperature": 0},
            "temperature=0, expected an option of the pipeline; temperature is a sampling parameter: pass it to "
            "SamplingParams",
        ),
        ({"max_length": 1}, "max_length=1, expected an integer of at least 2"),
        ({"max_support": 0}, "max_support=0, expected an integer of at least 1"),
        ({"filter_order": "random"}, 'filter_order=\'random\', expected "top_k_first" or "joint"'),
        ({"allow_unbounded_support": 1}, "allow_unbounded_support=1, expected True or False"),
    ],
)
def test_options(options, message):
    with pytest.raises(InvalidRequest) as refused:
        pipes.pipe(**options)
    assert str(refused.value) == message


def test_what_is_loaded_is_named_too():
    with pytest.raises(InvalidRequest) as refused:
        SpeculativePipeline.from_pretrained(targt="demo")
    assert str(refused.value) == "targt='demo', expected an option of the pipeline; did you mean target?"


def test_options_meet_the_target():
    assert pipes.target().max_position == 1024
    assert pipes.pipe(max_length=5000).capabilities.max_length == 1024

    class Wide:
        vocab_size = 262_145
        max_position = 4096

    with pytest.raises(InvalidRequest, match="vocab_size=262145, expected at most 262144"):
        SpeculativePipeline(Wide())


def test_capabilities_report():
    report = pipes.pipe().capabilities
    assert (report.method, report.block_size) == ("dflash", 4)
    assert report.sampling_verify_available
    assert report.masks_available
    ordinary = pipes.pipe(speculative=False).capabilities
    assert (ordinary.method, ordinary.block_size) == (None, 1)
    assert ordinary.masks_available
