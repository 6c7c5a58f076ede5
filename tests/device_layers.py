"""What decoder layers compute between products, on any device backend, against the host and against float64.

`up` makes an array the device's, `down` brings it back.
"""

import numpy as np

from gpu import swiglu, turn_heads
from tests.strategies import cast


def wide(array):
    """float64 of any of the dtypes."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def distance(dtype):
    """Half a unit in the last place, relative, and a little for sums in float32."""
    return {"float32": 2e-6, "float16": 2**-11 * 1.01, "bfloat16": 2**-8 * 1.01}[dtype]


def check_swiglu(up, down, dtype, count=7, width=74):
    """Small, large and opposite gates, zeros, and what isn't finite."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((count, 2 * width)).astype(np.float32) * 5
    special = np.array([0.0, -0.0, 80.0, -80.0, np.nan, np.inf, -np.inf], np.float32)
    values[:, 0] = special[:count]
    values[1:, width + 1] = special[: max(count - 1, 0)]
    rows = cast(values, dtype)
    want, got = np.empty((count, width), rows.dtype), up(np.zeros((count, width), rows.dtype))
    swiglu(rows, want)
    assert swiglu(up(rows), got) is None
    gates, gated = wide(rows)[:, :width], wide(rows)[:, width:]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = gates / (1 + np.exp(-gates)) * gated
    for out in (want, down(got)):
        finite = np.isfinite(exact)
        np.testing.assert_allclose(wide(out)[finite], exact[finite], rtol=distance(dtype), atol=1e-7)
        assert (np.isnan(wide(out)) == np.isnan(wide(want))).all()


def check_turn(up, down, dtype, batch=3, width=4, heads=3, held=2, size=16):
    """Queries turned, keys and values where they belong, nothing else touched."""
    rng, num = np.random.default_rng(1), 5 * batch * held * width
    rows = cast(rng.standard_normal((batch, width, (heads + 2 * held) * size)).astype(np.float32), dtype)
    angles = rng.uniform(0, 50, (batch, width, size // 2))
    angles = np.concatenate((angles, angles), -1)
    cosines, sines = (cast(f(angles).astype(np.float32), dtype) for f in (np.cos, np.sin))
    index = rng.permutation(num)[: batch * held * width].reshape(batch, held, width).astype(np.int64)
    outs = [np.full(shape, 9, rows.dtype) for shape in ((batch, heads, width, size), (num, size), (num, size))]
    own, by_rows = [up(out.copy()) for out in outs], up(np.full((batch, width, heads, size), 9, rows.dtype))
    turn_heads(rows, cosines, sines, index, *outs)
    for queries in (own[0], by_rows.transpose(0, 2, 1, 3)):
        turn_heads(*map(up, (rows, cosines, sines, index)), queries, *own[1:])
        for got, want in zip((queries, *own[1:]), outs, strict=True):
            np.testing.assert_array_equal(down(got), want)
    queries, keys, values = outs
    parts = rows.reshape(batch, width, -1, size).transpose(0, 2, 1, 3)
    x = wide(parts)
    rotated = np.concatenate((-x[..., size // 2 :], x[..., : size // 2]), -1)
    exact = x * wide(cosines)[:, None] + rotated * wide(sines)[:, None]
    close = {"rtol": distance(dtype), "atol": 1e-6}
    np.testing.assert_allclose(wide(queries), exact[:, :heads], **close)
    np.testing.assert_allclose(wide(keys)[index], exact[:, heads : heads + held], **close)
    np.testing.assert_array_equal(values[index], parts[:, heads + held :])
    for array in (keys, values):
        assert (np.delete(array, index.ravel(), 0) == 9).all()
