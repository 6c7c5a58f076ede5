"""adjust_logits of device arrays against its host twin: cases for the simulator and for a device."""

from dataclasses import fields

import numpy as np

from gpu import History, LogitBias, adjust_logits
from tests.strategies import landscape

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


def _up(up, record):
    return None if record is None else type(record)(*(up(getattr(record, field.name)) for field in fields(record)))


def check(up, down, seed, batch, width, size, history=0, bias=0, distinct=True, penalties=PENALTIES, pad=0):
    """Logits bit for bit the host's, in rows with `pad` elements between them that stay as they are."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["normal", "zeros", "holes", "few_values", "ties"], batch * width)
    x = np.stack([landscape(kind, size, rng) for kind in kinds]).reshape(batch, width, size)
    drafts = rng.integers(0, min(size, 6), (batch, width - 1)).astype(np.int32)
    num_drafts = rng.integers(0, width, batch).astype(np.int32)
    values = {
        "repetition_penalty": rng.choice([1.0, 1.3, 0.7], batch).astype(np.float32),
        "frequency_penalty": rng.choice([0.0, 0.7, -0.4], batch).astype(np.float32),
        "presence_penalty": rng.choice([0.0, 1.1, -2.0], batch).astype(np.float32),
    }
    values = {name: value for name, value in values.items() if name in penalties}
    seen = random_history(rng, batch, history, size) if history else None
    biases = random_bias(rng, batch, bias, size, distinct) if bias else None
    want = x.copy()
    adjust_logits(want, drafts, num_drafts, history=seen, logit_bias=biases, **values)
    wide = up(np.pad(x, ((0, 0), (0, 0), (0, pad)), constant_values=7.0))
    adjust_logits(
        wide[..., :size], up(drafts), up(num_drafts), history=_up(up, seen), logit_bias=_up(up, biases),
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


def check_what_is_out_of_range(up, down):
    """Ids outside the vocabulary and offsets past the end change nothing, and nothing beside the row."""
    size, bad = 40, np.array([-5, -1, 7, 40, 41, 10**6], np.int32)
    wide = up(np.full((1, 3, size + 60), 2.0, np.float32))
    history = History(np.array([0, 99]), bad, np.full(6, 2, np.int32), np.zeros(6, bool))
    bias = LogitBias(np.array([-3, 99]), bad[::-1].copy(), np.full(6, 1.5, np.float32))
    adjust_logits(
        wide[..., 30 : 30 + size], up(np.array([[-1, 40]], np.int32)), up(np.array([7], np.int32)),
        history=_up(up, history), presence_penalty=up(np.ones(1, np.float32)), logit_bias=_up(up, bias),
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
