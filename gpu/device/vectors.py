"""Logits on a device: granules of 32 bytes, loaded as two vectors, and the order key of an element.

A key is an unsigned integer in the order of the values: 16 bits for float16 and bfloat16, 32 for float32. NaN lies
above +inf or below -inf, -0.0 just below +0.0. A row begins anywhere: its granules are those of the memory (what one
access to it moves), and the first and the last may hold elements of its neighbours (`head` of them in the first).
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.instructions import float_to_half, half_to_float, max_bfloat16x2, max_float16x2, max_float32


class Format(NamedTuple):
    """How a kernel reads logits of one dtype."""

    name: str  # "float32", "float16" or "bfloat16"
    lanes: int  # elements a vector, half a granule
    bits: int  # of a key
    minus_inf: int  # the key of -inf
    plus_inf: int
    negative_zero: int
    key: Any  # (w0, w1, w2, w3, lane) -> key of an element, uint32
    rank: Any  # the same, but -0.0 has the key of +0.0: they are one value, and count as one
    reaching: Any  # (w0, w1, w2, w3, base) -> which elements' keys are at least base, as bits
    larger: Any  # (word, word) -> the larger of each place of two words; NaN if either is
    key_of_word: Any  # the largest key in a word; above plus_inf if it holds a NaN
    value: Any  # key -> float32
    decode: Any  # (w0, w1, w2, w3, lane) -> float32 of an element
    only: Any  # (w0, w1, w2, w3, mask) -> the words with -inf in place of the elements that aren't in the mask
    key_of_value: Any  # a float32's key; of one that the dtype doesn't have, that of a neighbour


@cuda.jit(device=True)
def _word(w0, w1, w2, w3, index):
    low = w1 if index == 1 else w0
    high = w3 if index == 3 else w2
    return high if index >= 2 else low


@cuda.jit(device=True)
def _half(w0, w1, w2, w3, lane):
    word = _word(w0, w1, w2, w3, lane >> 1)
    return np.uint32((word >> np.uint32(16)) if lane & 1 else (word & np.uint32(0xFFFF)))


@cuda.jit(device=True)
def _key16(bits):
    return np.uint32(bits ^ (np.uint32(0xFFFF) if bits & np.uint32(0x8000) else np.uint32(0x8000)))


@cuda.jit(device=True)
def _bits16(key):
    return np.uint32(key ^ (np.uint32(0x8000) if key & np.uint32(0x8000) else np.uint32(0xFFFF)))


@cuda.jit(device=True)
def _key32(bits):
    flip = np.uint32(0xFFFFFFFF) if bits & np.uint32(0x80000000) else np.uint32(0x80000000)
    return np.uint32(bits ^ flip)


@cuda.jit(device=True)
def _half_key(w0, w1, w2, w3, lane):
    return _key16(_half(w0, w1, w2, w3, lane))


@cuda.jit(device=True)
def _float_key(w0, w1, w2, w3, lane):
    return _key32(_word(w0, w1, w2, w3, lane))


def _rank_of(key, negative_zero):
    negative_zero = np.uint32(negative_zero)

    @cuda.jit(device=True)
    def rank(w0, w1, w2, w3, lane):
        own = key(w0, w1, w2, w3, lane)
        return np.uint32(own + np.uint32(1 if own == negative_zero else 0))

    return rank


@cuda.jit(device=True)
def halves_reaching(word, least):
    """Bits 15 and 31: whether each half of a word is at least that of `least`, unsigned."""
    kept = np.uint32((word | np.uint32(0x80008000)) - (least & np.uint32(0x7FFF7FFF)))  # no borrow between halves
    return np.uint32(((word & ~least) | (~(word ^ least) & kept)) & np.uint32(0x80008000))


@cuda.jit(device=True)
def interleave(even, odd):
    """Eight bits from two times four: even ones first."""
    even, odd = np.uint32((even | (even << 2)) & 0x33), np.uint32((odd | (odd << 2)) & 0x33)
    even, odd = np.uint32((even | (even << 1)) & 0x55), np.uint32((odd | (odd << 1)) & 0x55)
    return np.int32(even | (odd << 1))


@cuda.jit(device=True)
def interleave_halves(planes):
    """A word whose bits are those of its two halves in turn, from the low one's first on."""
    for shift, mask in ((8, 0x0000FF00), (4, 0x00F000F0), (2, 0x0C0C0C0C), (1, 0x22222222)):
        swapped = np.uint32((planes ^ (planes >> np.uint32(shift))) & np.uint32(mask))
        planes = np.uint32(planes ^ swapped ^ (swapped << np.uint32(shift)))
    return planes


@cuda.jit(device=True)
def _pair_of_keys(word):
    # Both halves' keys.
    negative = np.uint32((word >> np.uint32(15)) & np.uint32(0x00010001))
    return np.uint32(word ^ np.uint32(np.uint32(negative * np.uint32(0xFFFF)) | np.uint32(0x80008000)))


@cuda.jit(device=True)
def _halves_of_vector(w0, w1, w2, w3, base):
    least = np.uint32(base | (base << np.uint32(16)))
    planes = halves_reaching(_pair_of_keys(w0), least)
    planes = np.uint32((planes >> np.uint32(1)) | halves_reaching(_pair_of_keys(w1), least))
    planes = np.uint32((planes >> np.uint32(1)) | halves_reaching(_pair_of_keys(w2), least))
    planes = np.uint32((planes >> np.uint32(1)) | halves_reaching(_pair_of_keys(w3), least))
    return interleave((planes >> np.uint32(12)) & np.uint32(15), planes >> np.uint32(28))


@cuda.jit(device=True)
def _floats_of_vector(w0, w1, w2, w3, base):
    mask = np.int32(1 if _key32(w0) >= base else 0) | np.int32(2 if _key32(w1) >= base else 0)
    return np.int32(mask | np.int32(4 if _key32(w2) >= base else 0) | np.int32(8 if _key32(w3) >= base else 0))


@cuda.jit(device=True)
def _larger_bfloat16(a, b):
    return max_bfloat16x2(a, b)


@cuda.jit(device=True)
def _larger_float16(a, b):
    return max_float16x2(a, b)


@cuda.jit(device=True)
def _larger_float32(a, b):
    return max_float32(a, b)


@cuda.jit(device=True)
def _key_of_bfloat16s(pair):
    return _key16(np.uint32(max_bfloat16x2(pair, np.uint32(pair >> np.uint32(16))) & np.uint32(0xFFFF)))


@cuda.jit(device=True)
def _key_of_float16s(pair):
    return _key16(np.uint32(max_float16x2(pair, np.uint32(pair >> np.uint32(16))) & np.uint32(0xFFFF)))


@cuda.jit(device=True)
def _value_bfloat16(key):
    return np.uint32(_bits16(key) << np.uint32(16)).view(np.float32)


@cuda.jit(device=True)
def _value_float16(key):
    return half_to_float(_bits16(key))


@cuda.jit(device=True)
def _value_float32(key):
    flip = np.uint32(0x80000000) if key & np.uint32(0x80000000) else np.uint32(0xFFFFFFFF)
    return np.uint32(key ^ flip).view(np.float32)


@cuda.jit(device=True)
def _decode_bfloat16(w0, w1, w2, w3, lane):
    word = _word(w0, w1, w2, w3, lane >> 1)
    return np.uint32((word & np.uint32(0xFFFF0000)) if lane & 1 else (word << np.uint32(16))).view(np.float32)


@cuda.jit(device=True)
def _decode_float16(w0, w1, w2, w3, lane):
    return half_to_float(_half(w0, w1, w2, w3, lane))


@cuda.jit(device=True)
def _decode_float32(w0, w1, w2, w3, lane):
    return np.uint32(_word(w0, w1, w2, w3, lane)).view(np.float32)


@cuda.jit(device=True)
def _key_of_bfloat16(value):
    return _key16(np.uint32(np.float32(value).view(np.uint32) >> np.uint32(16)))


@cuda.jit(device=True)
def _key_of_float16(value):
    return _key16(np.uint32(float_to_half(value)))


@cuda.jit(device=True)
def _key_of_float32(value):
    return _key32(np.float32(value).view(np.uint32))


def _only_halves(minus_inf):
    pair = np.uint32(minus_inf << 16 | minus_inf)

    @cuda.jit(device=True)
    def only(w0, w1, w2, w3, mask):
        m0 = np.uint32((0xFFFF if mask & 1 else 0) | (0xFFFF0000 if mask & 2 else 0))
        m1 = np.uint32((0xFFFF if mask & 4 else 0) | (0xFFFF0000 if mask & 8 else 0))
        m2 = np.uint32((0xFFFF if mask & 16 else 0) | (0xFFFF0000 if mask & 32 else 0))
        m3 = np.uint32((0xFFFF if mask & 64 else 0) | (0xFFFF0000 if mask & 128 else 0))
        return (
            np.uint32((w0 & m0) | (pair & ~m0)), np.uint32((w1 & m1) | (pair & ~m1)),
            np.uint32((w2 & m2) | (pair & ~m2)), np.uint32((w3 & m3) | (pair & ~m3)),
        )  # fmt: skip

    return only


@cuda.jit(device=True)
def _only_floats(w0, w1, w2, w3, mask):
    minus_inf = np.uint32(0xFF800000)
    return (
        np.uint32(w0 if mask & 1 else minus_inf), np.uint32(w1 if mask & 2 else minus_inf),
        np.uint32(w2 if mask & 4 else minus_inf), np.uint32(w3 if mask & 8 else minus_inf),
    )  # fmt: skip


_FORMATS = {
    "bfloat16": Format(
        "bfloat16", 8, 16, 0x007F, 0xFF80, 0x7FFF, _half_key, _rank_of(_half_key, 0x7FFF), _halves_of_vector,
        _larger_bfloat16, _key_of_bfloat16s, _value_bfloat16, _decode_bfloat16, _only_halves(0xFF80), _key_of_bfloat16
    ),
    "float16": Format(
        "float16", 8, 16, 0x03FF, 0xFC00, 0x7FFF, _half_key, _rank_of(_half_key, 0x7FFF), _halves_of_vector,
        _larger_float16, _key_of_float16s, _value_float16, _decode_float16, _only_halves(0xFC00), _key_of_float16
    ),
    "float32": Format(
        "float32", 4, 32, 0x007FFFFF, 0xFF800000, 0x7FFFFFFF, _float_key, _rank_of(_float_key, 0x7FFFFFFF),
        _floats_of_vector, _larger_float32, _key32, _value_float32, _decode_float32, _only_floats, _key_of_float32
    ),
}  # fmt: skip


@lru_cache
def format_of(name: str) -> Format:
    """The format of a dtype's name."""
    return _FORMATS[name]


@cuda.jit(device=True)
def in_row(first, lane, vocabulary):
    """Whether element `lane` of a vector belongs to the row, `first` being the token id of its element 0."""
    return np.uint32(first + lane) < np.uint32(vocabulary)


@lru_cache
def cut_of(name: str) -> Any:
    """A device function (w0, w1, w2, w3, first, vocabulary): a vector with -inf where it belongs to the neighbours."""
    form = format_of(name)
    lanes, only = form.lanes, form.only

    @cuda.jit(device=True)
    def cut(w0, w1, w2, w3, first, vocabulary):
        mask = np.int32(0)
        for lane in range(lanes):
            if in_row(first, lane, vocabulary):
                mask = np.int32(mask | (1 << lane))
        return only(w0, w1, w2, w3, mask)

    return cut


@lru_cache
def reach_of(name: str) -> Any:
    """A device function: the least stored maximum of a granule with an element of at least this rank."""
    form = format_of(name)
    to_stored, positive_zero = np.uint32(form.bits - 16), np.uint32(form.negative_zero + 1)

    @cuda.jit(device=True)
    def reach(rank):
        return np.uint32(np.uint32(rank - np.uint32(1 if rank == positive_zero else 0)) >> to_stored)

    return reach


@lru_cache
def element_of(name: str) -> Any:
    """A device function (words, index) -> float32 of one element."""
    form = format_of(name)
    if name == "float32":

        @cuda.jit(device=True)
        def element(words, index):
            return np.uint32(words[index]).view(np.float32)

        return element
    value_of = form.value

    @cuda.jit(device=True)
    def packed_element(words, index):
        word = words[index >> 1]
        return value_of(_key16(np.uint32((word >> np.uint32(16)) if index & 1 else (word & np.uint32(0xFFFF)))))

    return packed_element
