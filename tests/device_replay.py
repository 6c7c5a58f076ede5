"""The replay kernels on any backend: cases for the host, the simulator and a device."""

import numpy as np

from gpu import row_sums, support_log_softmax, support_log_softmax_backward
from tests.strategies import cast, landscape

# Sizes of the supports, of a vocabulary of this size; a lane has none, one, or several entries of a row.
CASES = {
    "float32": ((1, 31, 129, 300), 300, "float32"),
    "float64": ((2, 128, 0, 260), 400, "float64"),
    "float16": ((33, 127), 256, "float16"),
    "bfloat16": ((200, 1, 64), 211, "bfloat16"),
}
ODD = {"ties": "ties", "zeros of both signs": "zeros", "holes": "holes", "alone": "one_hot", "huge": "huge"}
CASES |= {name: ((140, 90), 150, "float32", kind) for name, kind in ODD.items()}
CASES["the first of the largest in the last lane"] = ((300,) * 6, 300, "float64", "tops")


def _row(kind, size, rng):
    x = landscape("normal" if kind == "tops" else kind, size, rng)
    if kind == "tops":
        x[127:129] = x.max()
    return x


def a_case(dtype=np.float64):
    """(logits [4, 50], token ids, offsets, temperature)"""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(4, 50)).astype(dtype)
    offsets = np.array([0, 3, 4, 30, 37])
    ids = np.concatenate([np.sort(rng.choice(50, n, replace=False)) for n in np.diff(offsets)]).astype(np.int32)
    return logits, ids, offsets, np.array([0.5, 1.0, 2.0, 1.0])


def check_case(backend, name):
    """All three functions, of rows inside wider ones; the backend holds them against the host's."""
    sizes, vocabulary, dtype, *kind = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    x = np.stack([_row(kind[0] if kind else "normal", vocabulary, rng) for _ in sizes])
    x[-1, rng.integers(vocabulary)] = np.nan
    ids = [np.sort(rng.choice(vocabulary, size, replace=False)) for size in sizes]
    ids, offsets = np.concatenate(ids).astype(np.int32), np.cumsum([0, *sizes])
    temperature = rng.choice([1e-5, 0.7, 1.0, 3.0], len(sizes))
    temperature[np.array(sizes) == 1] = 0.0
    wide = np.zeros((len(sizes), vocabulary + 5), np.float64 if dtype == "float64" else cast(x, dtype).dtype)
    wide[:, 3:-2] = x if dtype == "float64" else cast(x, dtype)
    entries = backend.support_log_softmax(wide[:, 3:-2], ids, offsets, temperature)
    assert entries.shape == ids.shape
    grad_entries = rng.normal(size=ids.size)
    grad = np.zeros((len(sizes), vocabulary), wide.dtype)
    backend.support_log_softmax_backward(entries, grad_entries, ids, offsets, temperature, grad)
    assert grad.any()
    for values in (entries, grad_entries):
        assert backend.row_sums(values, offsets).shape == (len(sizes),)


def check_out_of_range(backend):
    """A wrong id harms its row, wrong offsets theirs; nothing is read or written elsewhere."""
    logits, ids, offsets, temperature = a_case()
    want, expected = support_log_softmax(logits, ids, offsets, temperature), np.zeros(logits.shape)
    grads = np.ones(ids.size)
    support_log_softmax_backward(want, grads, ids, offsets, temperature, expected)
    ids[[0, 1]] = -1, 50
    offsets[4] = 1000
    temperature[1:2] = 0.0
    arguments = [backend.up(array) for array in (ids, offsets, temperature)]
    entries = support_log_softmax(backend.up(logits), *arguments)
    grad = backend.up(np.zeros(logits.shape))
    support_log_softmax_backward(entries, backend.up(grads), *arguments, grad)
    got, gradient = backend.down(entries), backend.down(grad)
    assert np.isnan(got[:3]).all()
    assert got[3] == 0
    np.testing.assert_array_equal(got[4:], want[4:])
    assert not gradient[0][np.setdiff1d(np.arange(50), ids[2])].any()
    assert not gradient[1].any()
    np.testing.assert_array_equal(gradient[2:], expected[2:])
    sums = backend.down(row_sums(entries, arguments[1]))
    assert sums[3] == row_sums(want, np.array([0, 30, 37]))[1]


def check_arguments(up):
    """Yields what must be refused: a call, and what its message matches."""
    logits, ids, offsets, temperature = (up(array) for array in a_case())
    host = a_case()
    entries = up(np.zeros(37))
    forward, backward = support_log_softmax, support_log_softmax_backward
    good = ids, offsets, temperature
    yield lambda: forward(up(np.zeros(50)), *good), r"logits=\(50,\), expected a CuPy array of shape \[R, V\]"
    yield lambda: forward(up(np.zeros((4, 50), np.int32)), *good), "logits.dtype=int32, expected float32, float64"
    yield lambda: forward(up(np.zeros((4, 100)))[:, ::2], *good), "logits.strides=.*expected adjacent tokens"
    yield lambda: forward(up(np.zeros((4, 50)))[::-1], *good), "logits.strides=.*adjacent tokens and forward rows"
    yield lambda: forward(logits, host[1], offsets, temperature), r"token_ids=int32\[37\], expected a contiguous CuPy"
    yield lambda: forward(logits, ids, up(host[2][1:]), temperature), r"offsets=int64\[4\], expected .* int64\[5\]"
    yield lambda: forward(logits, ids, offsets, 1.0), r"temperature=float, expected a contiguous CuPy .* float64\[4\]"
    yield lambda: forward(logits, *good, out=up(np.zeros(36))), r"out=float64\[36\], expected .* float64\[37\]"
    wide = up(np.zeros((4, 60)))[:, :50]
    yield lambda: backward(entries, entries, *good, wide), "grad_logits=a view, expected a C-contiguous array"
    yield lambda: backward(entries, host[3], *good, logits), r"grad_entries=float64\[4\], expected a contiguous CuPy"
    yield lambda: row_sums(entries, host[2]), r"offsets=int64\[5\], expected a contiguous CuPy array int64\[5\]"
    yield lambda: row_sums(entries, offsets, out=up(np.zeros(5))), r"out=float64\[5\], expected .* float64\[4\]"
