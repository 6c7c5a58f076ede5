"""adjust_logits of device arrays against its host twin: cases for the simulator and for a device."""

from dataclasses import fields, replace

import numpy as np

from gpu import (
    DECODING,
    FIRST,
    IDLE,
    History,
    LogitBias,
    SlotHistory,
    Verdict,
    adjust_logits,
    count_committed,
    history_words,
)
from tests.strategies import cast, landscape

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def _csr(rng, batch, most, size, distinct):
    lengths = rng.integers(0, most + 1, batch)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = [rng.choice(size, length, replace=not distinct) for length in lengths]
    return offsets, [np.sort(part) if distinct else part for part in ids]


def random_history(rng, batch, most, size):
    """A History of up to `most` tokens a request."""
    offsets, ids = _csr(rng, batch, min(most, size), size, True)
    ids = np.concatenate(ids).astype(np.int32)
    counts = rng.integers(0, 4, ids.size).astype(np.int32)
    return History(offsets, ids, counts, (counts == 0) | (rng.random(ids.size) < 0.3))


def random_bias(rng, batch, most, size, distinct):
    """Up to `most` biases a request, of which some are 0 and some forbid."""
    offsets, ids = _csr(rng, batch, min(most, size) if distinct else most, size, distinct)
    ids = np.concatenate(ids).astype(np.int32)
    return LogitBias(offsets, ids, rng.choice([-np.inf, -3.3, 0.0, 0.1, 1e-3, 5.7], ids.size).astype(np.float32))


def mapped(up, record):
    """A record with its arrays on the device; None stays None, in it too."""
    if record is None:
        return None
    values = [getattr(record, field.name) for field in fields(record)]
    return type(record)(*(None if value is None else up(value) for value in values))


def random_slots(rng, batch, size, most=9, end=6):
    """A SlotHistory of slots that have seen up to `most` tokens of each kind, mostly ids below `end`."""
    end = min(end, size)

    def tokens():
        near = rng.integers(0, end, rng.integers(0, most + 1))
        return np.concatenate([near, rng.integers(0, size, rng.integers(0, most + 1))]).astype(np.int32)

    words = np.zeros((batch, size), np.int32)
    for b in range(batch):
        words[b] = history_words(size, tokens(), tokens(), tokens().tolist())
    bias = rng.choice(np.array([0, 0, 0, -0.0, -np.inf, -3.3, 0.1, 5.7], np.float32), (batch, size))
    return SlotHistory(words, bias, rng.integers(0, 5, batch), rng.integers(0, 8, batch))


def _penalties(rng, batch, names=PENALTIES):
    values = {
        "repetition_penalty": rng.choice([1.0, 1.3, 0.7], batch).astype(np.float32),
        "frequency_penalty": rng.choice([0.0, 0.7, -0.4], batch).astype(np.float32),
        "presence_penalty": rng.choice([0.0, 1.1, -2.0], batch).astype(np.float32),
    }
    return {name: value for name, value in values.items() if name in names}


def check(up, down, seed, batch, width, size, history=0, bias=0, distinct=True, penalties=PENALTIES, pad=0):
    """Logits bit for bit the host's, in rows with `pad` elements between them that stay as they are."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["normal", "zeros", "holes", "few_values", "ties"], batch * width)
    x = np.stack([landscape(kind, size, rng) for kind in kinds]).reshape(batch, width, size)
    drafts = rng.integers(0, min(size, 6), (batch, width - 1)).astype(np.int32)
    num_drafts = rng.integers(0, width, batch).astype(np.int32)
    values = _penalties(rng, batch, penalties)
    seen = random_history(rng, batch, history, size) if history else None
    biases = random_bias(rng, batch, bias, size, distinct) if bias else None
    want = x.copy()
    adjust_logits(want, drafts, num_drafts, history=seen, logit_bias=biases, **values)
    wide = up(np.pad(x, ((0, 0), (0, 0), (0, pad)), constant_values=7.0))
    adjust_logits(
        wide[..., :size], up(drafts), up(num_drafts), history=mapped(up, seen), logit_bias=mapped(up, biases),
        **{name: up(value) for name, value in values.items()},
    )  # fmt: skip
    got = down(wide)
    np.testing.assert_array_equal(got[..., :size].view(np.int32), want.view(np.int32))
    assert (got[..., size:] == 7.0).all()


CASES = {
    "everything": {"batch": 2, "width": 4, "size": 257, "history": 90, "bias": 12},
    "strided": {"batch": 2, "width": 3, "size": 33, "history": 20, "bias": 5, "pad": 3},
    "one row a request": {"batch": 3, "width": 1, "size": 100, "history": 100, "bias": 100},
    "long": {"batch": 1, "width": 2, "size": 1999, "history": 900, "bias": 400},
    "a token's biases in order": {"batch": 1, "width": 2, "size": 5, "bias": 30, "distinct": False},
    "no history": {"batch": 2, "width": 5, "size": 50},
    "frequency only": {"batch": 2, "width": 3, "size": 50, "history": 30, "penalties": ("frequency_penalty",)},
    "bias only": {"batch": 2, "width": 2, "size": 70, "bias": 40, "penalties": ()},
    "nothing": {"batch": 1, "width": 2, "size": 8, "penalties": ()},
}


def check_case(up, down, name):
    check(up, down, sorted(CASES).index(name), **CASES[name])


def check_slots(up, down, seed, batch, width, size, dtype="float32", penalties=PENALTIES, pad=0, in_place=False):
    """The same with a SlotHistory: of any dtype into float32, or float32 in place; NaN stays NaN."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["normal", "zeros", "holes", "few_values", "ties"], batch * width)
    x = np.array([landscape(kind, size, rng) for kind in kinds], np.float32).reshape(batch, width, size)
    x[rng.random(x.shape) < 0.01] = np.nan
    x = cast(x, dtype)
    drafts = rng.integers(-1, min(size, 6) + 1, (batch, width - 1)).astype(np.int32)
    num_drafts = rng.integers(0, width, batch).astype(np.int32)
    values, history = _penalties(rng, batch, penalties), random_slots(rng, batch, size)
    want = np.empty(x.shape, np.float32)
    adjust_logits(x, drafts, num_drafts, history=history, **values, out=want)
    wide = up(np.pad(x, ((0, 0), (0, 0), (pad, 0))))
    room = up(np.full((batch, width, size + pad), 7.0, np.float32))
    adjust_logits(
        wide[..., pad:], up(drafts), up(num_drafts), history=mapped(up, history),
        **{name: up(value) for name, value in values.items()}, out=None if in_place else room[..., :size],
    )  # fmt: skip
    got = down(wide)[..., pad:] if in_place else down(room)[..., :size]
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.int32)[number], want.view(np.int32)[number])  # zeros have signs
    assert (down(room)[..., size:] == 7.0).all()
    assert (down(wide)[..., :pad] == 0).all()
    if not in_place:
        np.testing.assert_array_equal(down(wide)[..., pad:], x)


SLOT_CASES = {
    "everything": {"batch": 3, "width": 4, "size": 257},
    "bfloat16": {"batch": 2, "width": 3, "size": 130, "dtype": "bfloat16", "pad": 1},
    "float16": {"batch": 2, "width": 2, "size": 67, "dtype": "float16", "pad": 3},
    "one row a slot": {"batch": 4, "width": 1, "size": 100},
    "in place": {"batch": 2, "width": 5, "size": 65, "pad": 2, "in_place": True},
    "a long block": {"batch": 1, "width": 9, "size": 64, "dtype": "bfloat16"},
    "frequency only": {"batch": 3, "width": 3, "size": 50, "penalties": ("frequency_penalty",)},
    "biases and bans only": {"batch": 2, "width": 3, "size": 70, "penalties": ()},
    "nobody": {"batch": 0, "width": 2, "size": 8},
}


def check_slot_case(up, down, name):
    check_slots(up, down, sorted(SLOT_CASES).index(name), **SLOT_CASES[name])


def a_verdict(rng, batch, width, size):
    """What a round came to, tokens of all kinds among it, and the phases of its slots."""
    tokens = rng.integers(-2, min(size, 4) + 1, (batch, width)).astype(np.int32)
    committed = rng.integers(0, width + 1, batch).astype(np.int32)
    nothing = np.zeros((batch, width), np.float32), np.zeros(batch, np.uint8), np.full(batch, -1, np.int32)
    phases = rng.choice([IDLE, FIRST, DECODING], batch).astype(np.int32)
    return Verdict(np.maximum(committed - 1, 0).astype(np.int32), committed, tokens, *nothing), phases


def check_count(up, down, batch=70, width=5, size=3):
    """Committed tokens in the words, in every phase."""
    rng = np.random.default_rng(batch)
    words = rng.integers(0, 100, (batch, size)).astype(np.int32)
    own, (verdict, phases) = up(words.copy()), a_verdict(rng, batch, width, size)
    for phase in (FIRST, DECODING):
        count_committed(own, mapped(up, verdict), up(phases), phase)
        count_committed(words, verdict, phases, phase)
    np.testing.assert_array_equal(down(own), words)


def check_what_is_out_of_range(up, down):
    """Ids outside the vocabulary and offsets past the end change nothing, and nothing beside the row."""
    size, bad = 40, np.array([-5, -1, 7, 40, 41, 10**6], np.int32)
    wide = up(np.full((1, 3, size + 60), 2.0, np.float32))
    history = History(np.array([0, 99]), bad, np.full(6, 2, np.int32), np.zeros(6, bool))
    bias = LogitBias(np.array([-3, 99]), bad[::-1].copy(), np.full(6, 1.5, np.float32))
    adjust_logits(
        wide[..., 30 : 30 + size], up(np.array([[-1, 40]], np.int32)), up(np.array([7], np.int32)),
        history=mapped(up, history), presence_penalty=up(np.ones(1, np.float32)), logit_bias=mapped(up, bias),
    )  # fmt: skip
    want = np.full((3, size + 60), 2.0, np.float32)
    want[:, 37] = 2.5
    np.testing.assert_array_equal(down(wide)[0], want)


def check_arguments(up):
    """Yields what must be refused: a call, and what its message matches."""
    x, drafts, num = up(np.zeros((1, 2, 4), np.float32)), up(np.zeros((1, 1), np.int32)), up(np.ones(1, np.int32))
    ids, counts, seen = up(np.zeros(2, np.int32)), up(np.ones(2, np.int32)), up(np.ones(2, bool))
    offsets, twos = up(np.array([0, 2])), up(np.full(1, 2, np.float32))

    def call(logits=x, num_drafts=num, **others):
        return lambda: adjust_logits(logits, drafts, num_drafts, **others)

    yield call(up(np.zeros((1, 2, 4), np.float16))), "logits.dtype=float16, expected float32"
    yield call(num_drafts=np.ones(1, np.int32)), r"num_drafts=int32\[1\], expected a contiguous CuPy array int32\[1\]"
    yield call(presence_penalty=up(np.ones(1))), r"presence_penalty=float64\[1\], expected .* float32\[1\]"
    yield (
        call(repetition_penalty=twos, history=History(offsets, ids, up(np.ones(3, np.int32)), seen)),
        r"history.output_counts=int32\[3\], expected .* int32\[2\]",
    )
    yield (
        call(repetition_penalty=twos, history=History(up(np.zeros(1, np.int64)), ids, counts, seen)),
        r"history.offsets=int64\[1\], expected .* int64\[2\]",
    )
    yield (
        call(logit_bias=LogitBias(offsets, ids, up(np.ones(2)))),
        r"logit_bias.values=float64\[2\], expected .* float32\[2\]",
    )


def check_slot_arguments(up):
    """The same of slots: they are refused before anything is launched."""
    rng = np.random.default_rng(0)
    x, drafts, num = up(np.zeros((2, 2, 4), np.float32)), up(np.zeros((2, 1), np.int32)), up(np.ones(2, np.int32))
    history, bits = mapped(up, random_slots(rng, 2, 4)), up(np.zeros((2, 2, 4), np.uint16))
    room = up(np.zeros((2, 2, 4), np.float32))

    def call(logits=x, out=None, **others):
        return lambda: adjust_logits(logits, drafts, num, history=replace(history, **others), out=out)

    yield call(bits), "logits.dtype=uint16, expected float32, or float32 memory in out"
    yield call(bits, out=bits), r"out=uint16\[2, 2, 4\], expected a \w+ array float32\[2, 2, 4\]"
    yield call(out=room[:, :1]), r"out=float32\[2, 1, 4\], expected a \w+ array float32\[2, 2, 4\]"
    yield call(words=up(np.zeros((2, 3), np.int32))), r"history.words=int32\[2, 3\], expected .* int32\[2, 4\]"
    yield call(bias=up(np.zeros((2, 4)))), r"history.bias=float64\[2, 4\], expected .* float32\[2, 4\]"
    yield call(generated=num), r"history.generated=int32\[2\], expected .* int64\[2\]"
    yield call(min_new_tokens=num), r"history.min_new_tokens=int32\[2\], expected .* int64\[2\]"
    bias = LogitBias(up(np.zeros(3, np.int64)), up(np.zeros(0, np.int32)), up(np.zeros(0, np.float32)))
    yield (
        lambda: adjust_logits(x, drafts, num, history=history, logit_bias=bias),
        "logit_bias=LogitBias, expected None with a SlotHistory",
    )
    yield lambda: adjust_logits(x, drafts, num, out=room), "out=.*, expected None without a SlotHistory"
    verdict, phases = a_verdict(rng, 2, 3, 4)
    verdict, phases, words = mapped(up, verdict), up(phases), up(np.zeros((2, 4), np.int32))
    yield lambda: count_committed(words, verdict, phases, IDLE), r"phase=0, expected FIRST \(1\) or DECODING \(2\)"
    yield lambda: count_committed(words[:1], verdict, phases, FIRST), r"words=int32\[1, 4\], expected .* int32\[2, 4\]"
    yield lambda: count_committed(words, verdict, phases[:1], FIRST), r"phases=int32\[1\], expected .* int32\[2\]"
