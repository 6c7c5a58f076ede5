"""The shared arithmetic: weights, keys and the decoding of half types."""

import ast
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

import gpu
from gpu import kernel_cache
from gpu.logit_rows import load, logit_rows
from gpu.weights import (
    HOTTEST,
    ONE,
    cutoff_key,
    key_of,
    least_difference,
    split_scale,
    value_of,
    weight,
    weight_of_difference,
)
from tests.strategies import fuzz

floats = st.floats(width=32, allow_nan=False)


@njit
def weights_of(x, maximum, temperature):
    c_hi, c_lo = split_scale(temperature)
    out = np.empty(x.size, np.int64)
    for i in range(x.size):
        out[i] = weight(x[i], maximum, c_hi, c_lo)
    return out


@njit
def weights_of_differences(x, maximum, temperature):
    c_hi, c_lo = split_scale(temperature)
    out = np.empty(x.size, np.int64)
    for i in range(x.size):
        out[i] = weight_of_difference(max(np.float32(x[i] - maximum), least_difference(c_hi)), c_hi, c_lo)
    return out


@njit
def decoded(flat):
    out = np.empty(flat.size, np.float32)
    for i in range(flat.size):
        out[i] = load(flat, i)
    return out


@pytest.mark.parametrize("temperature", [1e-5, 0.1, 0.7, 1.0, 1.7, 30.0, 1e6])
def test_relative_error(temperature):
    temperature = np.float32(temperature)
    x = (-np.linspace(0, 8, 100_001) * temperature).astype(np.float32)
    want = np.exp(x.astype(float) / float(temperature)) * ONE
    assert np.abs(weights_of(x, np.float32(0), temperature) / want - 1).max() < 1.5e-7


def test_the_maximum_weighs_one_and_the_rest_no_more():
    for maximum in (0.0, -0.0, 1e-45, -3e38, 3e38, 17.3):
        for temperature in (1e-5, 1.0, 3e38):
            x = np.array([maximum, np.nextafter(np.float32(maximum), np.float32(-np.inf)), -np.inf], np.float32)
            got = weights_of(x, np.float32(maximum), np.float32(temperature))
            assert got[0] == ONE
            assert 0 <= got[1] <= ONE
            assert got[2] == 0


def test_the_smallest_weights():
    x = (np.array([-43.99, -44.01, -45, -46, -1e9, -3e38]) * math.log(2)).astype(np.float32)
    assert weights_of(x, np.float32(0), np.float32(1)).tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.7, 1.0, 1.7, 30.0, 1e6, 1e20, HOTTEST])
@pytest.mark.parametrize("maximum", [0.0, 13.5, -7e4, 1e30, 3e38])
def test_the_shorter_way_to_a_weight_is_as_long(temperature, maximum):
    rng = np.random.default_rng(7)
    maximum, temperature = np.float32(maximum), np.float32(temperature)
    near, far = rng.random((2, 50_000))
    with np.errstate(over="ignore"):
        x = np.concatenate([maximum - near * 60 * temperature, maximum - 10 ** (far * 80 - 40)]).astype(np.float32)
    x = np.append(x[x <= maximum], np.array([maximum, -3.4e38, -np.inf], np.float32))
    np.testing.assert_array_equal(weights_of_differences(x, maximum, temperature), weights_of(x, maximum, temperature))


@fuzz
@given(a=floats, b=floats)
def test_keys_are_in_the_order_of_values(a, b):
    a, b = np.float32(a), np.float32(b)
    assert np.float32(value_of(key_of(a))).view(np.int32) == a.view(np.int32)
    assert (key_of(a) >= cutoff_key(b)) == (a >= b)


def test_nan_keys_lie_outside():
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001], np.uint32).view(np.float32)
    keys = [key_of(x) for x in nan]
    assert all(key > key_of(np.float32(np.inf)) or key < key_of(np.float32(-np.inf)) for key in keys)


def test_every_half_is_decoded_exactly():
    bits = np.arange(65536).astype(np.uint16)
    half = bits.view(np.float16)
    got = decoded(logit_rows(half[None], 2).flat)
    number = ~np.isnan(half)
    np.testing.assert_array_equal(got[number].view(np.uint32), half[number].astype(np.float32).view(np.uint32))
    assert np.isnan(got[~number]).all()
    bfloat = decoded(logit_rows(bits[None], 2).flat)
    np.testing.assert_array_equal(bfloat.view(np.uint32), bits.astype(np.uint32) << 16)


def test_rows_of_a_strided_view():
    whole = np.arange(2 * 3 * 10, dtype=np.float32).reshape(2, 3, 10)
    view = whole[:, 1:, 2:6]
    rows = logit_rows(view, 3)
    got = [rows.flat[start : start + rows.vocabulary].tolist() for start in rows.starts]
    assert got == view.reshape(4, 4).tolist()
    assert rows.flat.size == view[-1, -1, -1] - view[0, 0, 0] + 1


def test_stale_kernels_are_dropped(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    index = tmp_path / "__pycache__" / "kernel.nbi"
    source = tmp_path / "helper.py"
    source.write_text("")
    index.write_text("")
    os.utime(source, (1000, 1000))
    os.utime(index, (2000, 2000))
    kernel_cache.drop_stale(tmp_path)
    assert index.exists()
    os.utime(source, (3000, 3000))
    kernel_cache.drop_stale(tmp_path)
    assert not index.exists()


def test_gpu_imports_numpy_and_numba_only():
    allowed = {"numpy", "numba", "llvmlite", "cupy", "gpu"}
    allowed |= {"math", "dataclasses", "typing", "contextlib", "pathlib"}
    for source in Path(gpu.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= allowed, source
