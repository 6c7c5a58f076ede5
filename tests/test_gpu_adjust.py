"""adjust_logits against the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import History, LogitBias, adjust_logits
from tests import naive
from tests.strategies import fuzz, landscape


def history_of(prompts, outputs):
    """A History of token lists."""
    ids, counts, in_prompt, offsets = [], [], [], [0]
    for prompt, output in zip(prompts, outputs, strict=True):
        for token in sorted(set(prompt) | set(output)):
            ids.append(token)
            counts.append(output.count(token))
            in_prompt.append(token in prompt)
        offsets.append(len(ids))
    return History(
        np.array(offsets, np.int64),
        np.array(ids, np.int32),
        np.array(counts, np.int32),
        np.array(in_prompt, bool),
    )


def bias_of(pairs):
    flat = [pair for request in pairs for pair in request]
    return LogitBias(
        np.cumsum([0, *map(len, pairs)]).astype(np.int64),
        np.array([token for token, _ in flat], np.int32),
        np.array([value for _, value in flat], np.float32),
    )


@fuzz
@given(data=st.data(), size=st.sampled_from([2, 33, 257]))
def test_each_row_is_the_oracles(data, size):
    batch, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kinds = st.sampled_from(["normal", "zeros", "holes", "few_values"])
    logits = np.stack([landscape(data.draw(kinds), size, rng) for _ in range(batch * width)])
    logits = logits.reshape(batch, width, size)
    tokens = st.lists(st.integers(0, size - 1), max_size=12)
    prompts = [data.draw(tokens) for _ in range(batch)]
    outputs = [data.draw(tokens) for _ in range(batch)]
    drafts = rng.integers(0, min(size, 6), (batch, width - 1)).astype(np.int32)
    num_drafts = rng.integers(0, width, batch).astype(np.int32)
    for b in range(batch):
        drafts[b, num_drafts[b] :] = -1
    penalties = {
        "repetition_penalty": np.array([data.draw(st.sampled_from([1.0, 1.3, 0.5])) for _ in range(batch)], "f4"),
        "frequency_penalty": np.array([data.draw(st.sampled_from([0.0, 0.7, -0.4])) for _ in range(batch)], "f4"),
        "presence_penalty": np.array([data.draw(st.sampled_from([0.0, 1.1, -2.0])) for _ in range(batch)], "f4"),
    }
    values = st.sampled_from([-np.inf, -100.0, 0.0, 0.3, 5.0])
    bias = [data.draw(st.lists(st.tuples(st.integers(0, size - 1), values), max_size=3)) for _ in range(batch)]
    got = logits.copy()
    adjust_logits(got, drafts, num_drafts, history=history_of(prompts, outputs), logit_bias=bias_of(bias), **penalties)
    for b in range(batch):
        for i in range(width):
            want = logits[b, i]
            if i <= num_drafts[b]:
                before = drafts[b, :i].tolist()
                own = [values[b] for values in penalties.values()]
                want = naive.adjust(logits[b, i], prompts[b], outputs[b] + before, *own, bias[b])
            np.testing.assert_array_equal(got[b, i], want)


def test_neutral_requests_keep_their_bits():
    x = landscape("zeros", 257, np.random.default_rng(15)).reshape(1, 1, 257).repeat(2, 0)
    x[:, :, 5] = np.nan
    before = x.copy()
    history = history_of([[1, 2], [1, 2]], [[3], [3]])
    adjust_logits(
        x,
        np.empty((2, 0), np.int32),
        np.zeros(2, np.int32),
        history=history,
        repetition_penalty=np.array([1.0, 2.0], np.float32),
        frequency_penalty=np.zeros(2, np.float32),
        logit_bias=bias_of([[(1, 0.0)], []]),
    )
    np.testing.assert_array_equal(x[0].view(np.int32), before[0].view(np.int32))


def test_worked_row_by_row():
    x = np.array([[[2.0, -2.0, 1.0, 0.5]] * 3], np.float32)
    adjust_logits(
        x,
        np.array([[2, 2]], np.int32),
        np.array([2], np.int32),
        history=history_of([[1]], [[0]]),
        repetition_penalty=np.array([2.0], np.float32),
        frequency_penalty=np.array([0.25], np.float32),
        presence_penalty=np.array([0.5], np.float32),
        logit_bias=bias_of([[(3, -np.inf)]]),
    )
    none = -np.inf
    assert x[0].tolist() == [[0.25, -4.0, 1.0, none], [0.25, -4.0, -0.25, none], [0.25, -4.0, -0.5, none]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"repetition_penalty": np.zeros(1, np.float32)},
            r"repetition_penalty\[0\]=0.0, expected a finite number",
        ),
        ({"presence_penalty": np.full(1, np.nan, np.float32)}, r"presence_penalty\[0\]=nan, expected"),
        (
            {"frequency_penalty": np.zeros(1)},
            r"frequency_penalty=float64\[1\], expected a NumPy array float32\[1\]",
        ),
        ({"num_drafts": np.array([2], np.int32)}, r"num_drafts\[0\]=2, expected 0..1"),
        ({"logit_bias": bias_of([[(4, 1.0)]])}, r"logit_bias.token_ids\[0\]=4, expected a token id below 4"),
        ({"logit_bias": bias_of([[(0, np.inf)]])}, r"logit_bias.values\[0\]=inf, expected a number below"),
        ({"history": history_of([[9]], [[]])}, r"history.token_ids\[0\]=9, expected a token id below 4"),
        (
            {"history": History(np.array([0, 2]), np.zeros(2, "i4"), np.ones(2, "i4"), np.ones(2, bool))},
            r"expected strictly ascending ids",
        ),
        (
            {"history": History(np.array([0, 9]), np.zeros(1, "i4"), np.ones(1, "i4"), np.ones(1, bool))},
            r"history.offsets=\[0, 9\], expected ascending offsets from 0 to 1",
        ),
    ],
)
def test_bad_arguments(change, message):
    arguments = {
        "num_drafts": np.array([1], np.int32),
        "repetition_penalty": np.full(1, 2, np.float32),
        "history": history_of([[1]], [[2]]),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        adjust_logits(np.zeros((1, 2, 4), np.float32), np.zeros((1, 1), np.int32), **arguments)
