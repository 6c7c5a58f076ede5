"""SamplingParams are validated at construction, by name and value."""

import inspect
import json
import math
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from pipeline import InvalidRequest, SamplingParams

NAMES = [one.name for one in fields(SamplingParams)]
REFUSED = [
    ({"temperature": -0.1}, "temperature=-0.1, expected a number from 0 to 1e30"),
    ({"temperature": math.nan}, "temperature=nan, expected a number from 0 to 1e30"),
    ({"temperature": math.inf}, "temperature=inf, expected a number from 0 to 1e30"),
    ({"temperature": "1"}, "temperature='1', expected a number from 0 to 1e30"),
    ({"temperature": True}, "temperature=True, expected a number from 0 to 1e30"),
    ({"temperature": 1e39}, "temperature=1e+39, expected a number from 0 to 1e30"),
    ({"top_p": 1e-50}, "top_p=1e-50, expected a number above 0 and at most 1"),
    ({"min_p": 1 - 1e-12}, "min_p=0.999999999999, expected a number of at least 0 and below 1"),
    ({"repetition_penalty": 1e-60}, "repetition_penalty=1e-60, expected a finite number above 0 (1: neutral)"),
    ({"logit_bias": {1: 1e39}}, "logit_bias={1: 1e+39}, expected a mapping of token ids to numbers below +inf"),
    ({"temperature": 10**400}, "temperature=1000"),
    ({"temperature": -1e-50}, "temperature=-1e-50, expected a number from 0 to 1e30"),
    ({"min_p": -1e-60}, "min_p=-1e-60, expected a number of at least 0 and below 1"),
    ({"top_p": 1.000000001}, "top_p=1.000000001, expected a number above 0 and at most 1"),
    ({"top_k": torch.tensor(5.9)}, "top_k=tensor(5.9000), expected an integer of at least 1, or None for no bound"),
    ({"top_k": np.array([5, 6])}, "top_k=array([5, 6]), expected an integer of at least 1, or None for no bound"),
    ({"seed": np.array([1, 2])}, "seed=array([1, 2]), expected an integer in [0, 2**64), or None to draw one"),
    ({"stop_token_ids": [torch.tensor(2.9)]}, "stop_token_ids=[tensor(2.9000)], expected a sequence of token ids"),
    ({"n": 10**12}, "n=1000000000000, expected an integer from 1 to 1048576"),
    ({"top_k": 0}, "top_k=0, expected an integer of at least 1, or None for no bound"),
    ({"top_k": -1}, "top_k=-1, expected an integer of at least 1, or None for no bound"),
    ({"top_k": 2.0}, "top_k=2.0, expected an integer of at least 1, or None for no bound"),
    ({"top_p": 0}, "top_p=0, expected a number above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p=1.5, expected a number above 0 and at most 1"),
    ({"min_p": 1}, "min_p=1, expected a number of at least 0 and below 1"),
    ({"min_p": -0.1}, "min_p=-0.1, expected a number of at least 0 and below 1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0, expected a finite number above 0 (1: neutral)"),
    ({"presence_penalty": math.inf}, "presence_penalty=inf, expected a finite number"),
    ({"frequency_penalty": "no"}, "frequency_penalty='no', expected a finite number"),
    ({"logit_bias": {-1: 0.0}}, "logit_bias={-1: 0.0}, expected a mapping of token ids to numbers below +inf"),
    ({"logit_bias": {1: math.inf}}, "logit_bias={1: inf}, expected a mapping of token ids to numbers below +inf"),
    ({"logit_bias": [1]}, "logit_bias=[1], expected a mapping of token ids to numbers below +inf"),
    ({"logits_processors": [3]}, "logits_processors=[3], expected a sequence of callables"),
    ({"grammar": "{}"}, "grammar='{}', expected None, or a mapping with one of"),
    ({"max_time": 0}, "max_time=0, expected a finite number of seconds above 0, or None for no limit"),
    ({"max_new_tokens": 0}, "max_new_tokens=0, expected an integer of at least 1"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1, expected an integer of at least 0"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9, expected at most max_new_tokens=8"),
    ({"stop": ["a", ""]}, "stop=['a', ''], expected a non-empty string or a sequence of non-empty strings"),
    ({"stop": 3}, "stop=3, expected a non-empty string or a sequence of non-empty strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1], expected a sequence of token ids"),
    ({"stop_token_ids": 3}, "stop_token_ids=3, expected a sequence of token ids"),
    ({"seed": -1}, "seed=-1, expected an integer in [0, 2**64), or None to draw one"),
    ({"seed": 2**64}, f"seed={2**64}, expected an integer in [0, 2**64), or None to draw one"),
    ({"n": 0}, "n=0, expected an integer from 1 to 1048576"),
    ({"top_logprobs": -1}, "top_logprobs=-1, expected an integer of at least 0"),
    ({"ignore_eos": 1}, "ignore_eos=1, expected True or False"),
    ({"return_sampling_mask": "yes"}, "return_sampling_mask='yes', expected True or False"),
    ({"sampling_logprobs": "all"}, 'sampling_logprobs=\'all\', expected "selected" or "support"'),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message.split(",")[0] for _, message in REFUSED])
def test_refused_by_name_and_value(values, message):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**values)
    assert str(refusal.value).startswith(message)


NEAR = "expected a sampling parameter; did you mean {}?"
OPTION = "expected a sampling parameter; {} is an option of the pipeline: pass it to SpeculativePipeline"
UNKNOWN = [
    ({"max_tokens": 5}, "max_tokens=5, " + NEAR.format("max_new_tokens")),
    ({"temprature": 0.5}, "temprature=0.5, " + NEAR.format("temperature")),
    ({"top_p": 0.9, "topk": 4}, "topk=4, " + NEAR.format("top_k")),
    ({"max_batch": 8}, "max_batch=8, " + OPTION.format("max_batch")),
    ({"max_batch_size": 8}, "max_batch_size=8, " + OPTION.format("max_batch")),
    ({"max_length": 64}, "max_length=64, " + OPTION.format("max_length")),
    ({"beams": 2}, f"beams=2, expected a sampling parameter: one of {', '.join(NAMES)}"),
    ({"beams": "x" * 99}, f"beams='{'x' * 76}..., expected a sampling parameter: one of temperature"),
]


@pytest.mark.parametrize(("values", "message"), UNKNOWN, ids=[message.split(",")[0][:20] for _, message in UNKNOWN])
def test_unknown_names_are_refused_with_the_nearest(values, message):
    for make in (SamplingParams, lambda **values: replace(SamplingParams(), **values)):
        with pytest.raises(InvalidRequest) as refusal:
            make(**values)
        assert str(refusal.value).startswith(message)


def test_it_looks_like_a_dataclass():
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == NAMES
    assert parameters["max_new_tokens"].default == 256
    assert pickle.loads(pickle.dumps(SamplingParams(top_k=5))) == SamplingParams(top_k=5)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.8)


def test_frozen_and_normalised():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(AttributeError):
        params.temperature = 2.0


@pytest.mark.parametrize(
    ("values", "greedy"),
    [({"temperature": 0}, True), ({"temperature": 9e-6}, True), ({"top_k": 1}, True), ({"temperature": 1e-5}, False)],
)
def test_greedy(values, greedy):
    assert SamplingParams(**values).greedy is greedy


def test_as_json_can_hold_it():
    params = SamplingParams(logit_bias={5: -math.inf}, logits_processors=[len], stop="x", seed=2**64 - 1)
    held = json.loads(json.dumps(params.to_dict()))
    assert held["logits_processors"] == [repr(len)]
    assert held["seed"] == 2**64 - 1
    assert held["logit_bias"] == {"5": "-inf"}


def test_what_was_checked_is_what_is_used():
    bias, processors = {5: 1.0}, [len]
    params = SamplingParams(logit_bias=bias, logits_processors=processors)
    bias[6] = math.nan
    processors.append(print)
    assert dict(params.logit_bias) == {5: 1.0}
    assert params.logits_processors == (len,)
    with pytest.raises(TypeError):
        params.logit_bias[6] = 1.0
    assert hash(params) == hash(SamplingParams(logits_processors=[len]))


def test_bounds_are_inside():
    """Also where the kernels' float32 is a little larger, and of what no kernel sees."""
    assert SamplingParams(temperature=1e30).temperature == 1e30
    for seconds in (1e-300, 1e300):
        assert SamplingParams(max_time=seconds).max_time == seconds


def test_numbers_of_other_kinds():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(5), seed=torch.tensor(3), n=np.uint8(2), top_p=np.float64(0.5)
    )
    assert (params.temperature, params.top_k, params.seed, params.n, params.top_p) == (0.5, 5, 3, 2, 0.5)
    json.dumps(params.to_dict())
