"""Philox4x32-10 (Salmon et al. 2011): random numbers that depend on a seed and a position only.

The key is a request's seed, the counter (position, purpose): nothing depends on the batch. A uniform is
(word + 0.5) * 2^-32, never 0 and never 1.

Most purposes need a number a position: column i of a request at position p is that of position p + i, whichever round
asks for it. A block of drafts that is verified as one looks at the coins of positions that it doesn't commit, which the
next round would toss a second time; so ACCEPT_BLOCK has numbers a round: column i at position p has the counter
(position p, purpose, i).
"""

import numpy as np

from gpu.arrays import Array, on_device
from gpu.checks import check_array, check_range
from gpu.random.parameters import ACCEPT_BLOCK, KEY_STEPS, MULTIPLIERS, ROUNDS, SAMPLE

_WORD = np.uint64(32)


def philox_4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Random words uint32 [..., 4] of counters uint32 [..., 4] under keys uint32 [..., 2] (broadcast)."""
    for name, value, words in (("counter", counter, 4), ("key", key, 2)):
        if not isinstance(value, np.ndarray) or value.dtype != np.uint32 or value.shape[-1:] != (words,):
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else value
            raise ValueError(f"{name}={got}, expected a NumPy array uint32 [..., {words}]")
    # A leading axis, because NumPy warns when a scalar wraps.
    shape = (1, *np.broadcast_shapes(counter.shape[:-1], key.shape[:-1]))
    c = [np.broadcast_to(counter[..., i], shape) for i in range(4)]
    k = [np.array(np.broadcast_to(key[..., i], shape)) for i in range(2)]
    for _ in range(ROUNDS):
        products = [m * c[2 * i].astype(np.uint64) for i, m in enumerate(MULTIPLIERS)]
        high = [(product >> _WORD).astype(np.uint32) for product in products]
        low = [product.astype(np.uint32) for product in products]  # wraps to the low word
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]]
        k = [word + step for word, step in zip(k, KEY_STEPS, strict=True)]
    return np.stack(c, -1)[0]


def _words(values: np.ndarray) -> list[np.ndarray]:
    values = values.astype(np.uint64)
    return [values.astype(np.uint32), (values >> _WORD).astype(np.uint32)]


def uniforms(seeds: Array, positions: Array, width: int, purpose: int, *, out: Array | None = None) -> Array:
    """Uniforms float64 [B, width] for positions p..p+width-1 of each request: the first Philox word.

    seeds uint64 [B]; positions int64 [B], at least 0; purpose: ACCEPT, DRAW or PROPOSAL; or ACCEPT_BLOCK, for `width`
    coins of position p alone. All NumPy arrays or all CuPy arrays, for the same numbers; the values of CuPy arrays
    aren't checked. out: where they are written.
    """
    if width < 0:
        raise ValueError(f"width={width}, expected at least 0")
    if on_device(seeds):
        from gpu.random import device

        return device.uniforms(seeds, positions, width, purpose, out)
    if not isinstance(seeds, np.ndarray) or seeds.ndim != 1:
        raise ValueError(f"seeds={seeds!r}, expected a NumPy array uint64 [B]")
    seeds = check_array("seeds", seeds, np.uint64, seeds.shape)
    positions = check_array("positions", positions, np.int64, seeds.shape)
    check_range("positions", positions, positions >= 0, "at least 0")
    if out is None:
        out = np.empty((seeds.size, width))
    elif not isinstance(out, np.ndarray) or out.dtype != np.float64 or out.shape != (seeds.size, width):
        raise ValueError(f"out={out!r}, expected a NumPy array float64 [{seeds.size}, {width}]")
    columns, none = np.arange(width), np.zeros(width, np.int64)
    step, place = (none, columns) if purpose == ACCEPT_BLOCK else (columns, none)
    low, high = _words(positions[:, None] + step)
    place = np.broadcast_to(place.astype(np.uint32), low.shape)
    counter = np.stack([low, high, np.full_like(low, purpose), place], -1)
    key = np.stack(_words(seeds), -1)[:, None, :]
    return np.multiply(philox_4x32(counter, key)[..., 0] + 0.5, 2.0**-32, out=out)


def sample_seeds(seed: int, n: int) -> list[int]:
    """The seeds of the n samples of a prompt: the seed itself, then two Philox words for each further one."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed={seed}, expected 0..2^64-1")
    if n < 1:
        raise ValueError(f"n={n}, expected at least 1")
    if n == 1:
        return [seed]
    low, high = _words(np.arange(1, n))
    counter = np.stack([low, high, np.full_like(low, SAMPLE), np.zeros_like(low)], -1)
    words = philox_4x32(counter, np.concatenate(_words(np.array([seed], np.uint64)))).astype(np.uint64)
    return [seed, *(words[:, 0] | words[:, 1] << _WORD).tolist()]
