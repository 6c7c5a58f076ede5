"""adjust_logits against the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import DECODING, History, LogitBias, SlotHistory, adjust_logits, count_committed, history_words
from tests import device_adjust, naive
from tests.strategies import DTYPES, cast, fuzz, landscape


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


@fuzz
@given(data=st.data(), size=st.sampled_from([1, 2, 33, 257]), dtype=st.sampled_from(DTYPES))
def test_each_row_of_a_slot_is_the_oracles(data, size, dtype):
    """Through rounds that commit: what they counted is the next one's history."""
    batch, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kinds = st.sampled_from(["normal", "zeros", "holes", "few_values"])
    tokens = st.lists(st.integers(0, size - 1), max_size=8)
    prompts, outputs, endings = ([data.draw(tokens) for _ in range(batch)] for _ in range(3))
    penalties = {
        "repetition_penalty": np.array([data.draw(st.sampled_from([1.0, 1.3, 0.5])) for _ in range(batch)], "f4"),
        "frequency_penalty": np.array([data.draw(st.sampled_from([0.0, 0.7, -0.4])) for _ in range(batch)], "f4"),
        "presence_penalty": np.array([data.draw(st.sampled_from([0.0, 1.1, -2.0])) for _ in range(batch)], "f4"),
    }
    history = SlotHistory(
        words=np.stack([history_words(size, *map(ids, of)) for of in zip(prompts, outputs, endings, strict=True)]),
        bias=rng.choice(np.array([-np.inf, -100.0, 0.0, 0.0, 0.3], np.float32), (batch, size)),
        generated=np.array([len(output) for output in outputs]),
        min_new_tokens=rng.integers(0, 12, batch),
    )
    for _ in range(2):
        x = np.stack([landscape(data.draw(kinds), size, rng) for _ in range(batch * width)])
        x[rng.random(x.shape) < 0.05] = data.draw(st.sampled_from([np.nan, np.inf, 0.0]))
        logits = cast(x.reshape(batch, width, size), dtype)
        values = naive.decode(logits).astype(np.float32)
        drafts = rng.integers(0, min(size, 6), (batch, width - 1)).astype(np.int32)
        num_drafts = rng.integers(0, width, batch).astype(np.int32)
        got = np.empty(logits.shape, np.float32)
        adjust_logits(logits, drafts, num_drafts, history=history, **penalties, out=got)
        for b in range(batch):
            for i in range(width):
                want = values[b, i]
                if i <= num_drafts[b]:
                    output = outputs[b] + drafts[b, :i].tolist()
                    own = [each[b] for each in penalties.values()]
                    banned = endings[b] if len(output) < history.min_new_tokens[b] else ()
                    want = naive.adjust(want, prompts[b], output, *own, list(enumerate(history.bias[b])), banned)
                np.testing.assert_array_equal(got[b, i], want)
        verdict, phases = device_adjust.a_verdict(rng, batch, width, size)
        count_committed(history.words, verdict, phases, DECODING)
        for b in np.flatnonzero(phases == DECODING):
            committed = verdict.tokens[b, : verdict.num_committed[b]].tolist()
            outputs[b] += [token for token in committed if 0 <= token < size]
            history.generated[b] = len(outputs[b])


def ids(tokens):
    return np.array(tokens, np.int32)


def test_slots_and_lists_are_the_same_to_the_last_bit():
    rng = np.random.default_rng(1)
    x = np.stack([landscape("normal", 257, rng) for _ in range(8)]).reshape(2, 4, 257)
    prompts, outputs = rng.integers(0, 257, (2, 2, 40)).tolist()
    drafts, num_drafts = rng.integers(0, 257, (2, 3)).astype(np.int32), np.array([3, 2], np.int32)
    values = {"repetition_penalty": np.float32([1.3, 0.9]), "frequency_penalty": np.float32([0.1, 0.0])}
    bias = rng.normal(size=(2, 257)).astype(np.float32)
    words = np.stack([history_words(257, ids(prompts[b]), ids(outputs[b])) for b in range(2)])
    slots = SlotHistory(words, bias, np.array([40, 40]), np.array([99, 99]))
    lists, biases = history_of(prompts, outputs), bias_of([list(enumerate(row)) for row in bias])
    adjusted = x.copy()
    adjust_logits(x, drafts, num_drafts, history=slots, **values)
    adjust_logits(adjusted, drafts, num_drafts, history=lists, logit_bias=biases, **values)
    np.testing.assert_array_equal(x.view(np.int32), adjusted.view(np.int32))


def test_a_slot_that_nobody_adjusts_keeps_its_bits():
    x = landscape("zeros", 257, np.random.default_rng(15)).reshape(1, 1, 257).repeat(2, 1)
    x[:, :, 5], x[:, :, 6] = np.nan, -np.inf
    before = x.copy()
    words = history_words(257, ids([1, 2]), ids([3, 3]), [7])[None]
    history = SlotHistory(words, np.full((1, 257), -0.0, np.float32), np.ones(1, np.int64), np.zeros(1, np.int64))
    penalties = np.ones(1, np.float32), np.full(1, -0.0, np.float32), np.zeros(1, np.float32)
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    num_drafts = np.ones(1, np.int32)
    adjust_logits(x, ids([[3]]), num_drafts, history=history, **dict(zip(names, penalties, strict=True)))
    np.testing.assert_array_equal(x.view(np.int32), before.view(np.int32))


def test_bad_arguments_of_slots():
    for call, message in device_adjust.check_slot_arguments(lambda array: array):
        with pytest.raises(ValueError, match=message):
            call()
    for name, of in {"prompt": ([9], [], []), "output": ([], [-1], []), "endings": ([], [], [4])}.items():
        with pytest.raises(ValueError, match=rf"{name}\[0\]=.*, expected a token id below 4"):
            history_words(4, ids(of[0]), ids(of[1]), of[2])


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
