"""restrict_logits of device arrays against its host twin: cases for the simulator and for a device."""

import numpy as np

from gpu import restrict_logits
from tests.strategies import cast, landscape

KINDS = ("normal", "holes", "zeros", "huge")


def random_case(rng, batch, width, size, num_masks, dtype, share=0.5):
    """Logits with NaN and infinities among them, masks with full and empty words, and which mask is a row's."""
    x = np.stack([landscape(kind, size, rng) for kind in rng.choice(KINDS, batch * width)])
    x[rng.random(x.shape) < 0.02] = np.nan
    x[rng.random(x.shape) < 0.02] = np.inf
    words = -(-size // 32)
    allowed = np.packbits(rng.random((num_masks, words, 32)) < share, axis=2, bitorder="little").view(np.int32)[..., 0]
    allowed[rng.random(allowed.shape) < 0.2] = -1
    allowed[rng.random(allowed.shape) < 0.2] = 0
    rows = rng.integers(-1, num_masks, (batch, width)).astype(np.int32)
    return cast(x, dtype).reshape(batch, width, size), allowed, rows


def check(up, down, seed, batch=2, width=3, size=257, num_masks=4, dtype="float32", pad=0):
    """Logits bit for bit the host's, in rows with `pad` elements between them that stay as they are."""
    rng = np.random.default_rng(seed)
    x, allowed, rows = random_case(rng, batch, width, size, num_masks, dtype)
    want = x.copy()
    restrict_logits(want, allowed, rows)
    wide = up(np.pad(x, ((0, 0), (0, 0), (0, pad)), constant_values=7))
    restrict_logits(wide[..., :size], up(allowed), up(rows))
    got = down(wide)
    np.testing.assert_array_equal(got[..., :size].view(f"u{x.itemsize}"), want.view(f"u{x.itemsize}"))
    assert (got[..., size:] == 7).all()


CASES = {
    "float32": {},
    "float16": {"dtype": "float16", "size": 100},
    "bfloat16": {"dtype": "bfloat16", "size": 333},
    "strided": {"size": 33, "pad": 3},
    "one token": {"size": 1},
    "a word": {"size": 32, "num_masks": 1},
    "no mask": {"num_masks": 0},
    "several blocks a row": {"batch": 1, "width": 2, "size": 9000, "num_masks": 2},
}


def check_case(up, down, name):
    check(up, down, sorted(CASES).index(name), **CASES[name])


def check_what_is_out_of_range(up, down):
    """Rows that name no mask stay as they are."""
    x = up(np.ones((1, 4, 40), np.float32))
    rows = up(np.array([[-7, 1, 2, 10**6]], np.int32))
    restrict_logits(x, up(np.zeros((2, 2), np.int32)), rows)
    assert np.isneginf(down(x)[0, 1]).all()
    assert (down(x)[0, [0, 2, 3]] == 1).all()


def check_arguments(up):
    """Yields what must be refused: a call, and what its message matches."""
    x, allowed, rows = (
        up(np.zeros((1, 2, 40), np.float32)),
        up(np.zeros((1, 2), np.int32)),
        up(np.zeros((1, 2), np.int32)),
    )

    def call(logits=x, allowed=allowed, rows=rows):
        return lambda: restrict_logits(logits, allowed, rows)

    yield call(up(np.zeros((1, 2, 40)))), "logits.dtype=float64, expected float32, float16, bfloat16"
    yield call(allowed=up(np.zeros((1, 3), np.int32))), r"allowed=int32\[1, 3\], expected .* int32\[1, 2\]"
    yield call(allowed=up(np.zeros((1, 2), np.uint32))), r"allowed=uint32\[1, 2\], expected .* int32\[1, 2\]"
    yield call(rows=up(np.zeros((2, 1), np.int32))), r"rows=int32\[2, 1\], expected .* int32\[1, 2\]"
    yield call(up(np.zeros((2, 40), np.float32))), r"logits=\(2, 40\), expected .* of shape \[B, W, V\]"
