"""The replay kernels against the dense oracle, over dtypes, temperatures, layouts and odd logits."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu import row_sums, support_log_softmax, support_log_softmax_backward
from gpu.replay.arithmetic import exp64, log1p64
from gpu.replay.elements import bfloat16_bits, half_bits
from gpu.replay.kernel import backward_kernel, log_softmax_kernel, sums_kernel
from tests import device_graph, device_replay, naive, naive_trainer
from tests.backends import DEVICE
from tests.device_replay import a_case
from tests.ptx import analyse, compile_ptx
from tests.strategies import DTYPES, FAR, LANDSCAPES, cast, fuzz, landscape

TEMPERATURES = st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0, 1e6])


@st.composite
def supports(draw):
    """(logits in their dtype, their values in float64, CSR, temperatures)"""
    size = draw(st.sampled_from([1, 2, 31, 33, 257]))
    count = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([*DTYPES, "float64"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = np.stack([landscape(draw(st.sampled_from(LANDSCAPES + FAR)), size, rng) for _ in range(count)])
    logits = x.astype(np.float64) if dtype == "float64" else cast(x, dtype)
    ids = [np.sort(rng.choice(size, rng.integers(1, size + 1), replace=False)) for _ in range(count)]
    offsets = np.cumsum([0, *map(len, ids)])
    temperature = np.array([draw(TEMPERATURES) for _ in range(count)])
    return logits, naive.decode(logits), np.concatenate(ids).astype(np.int32), offsets, temperature


@fuzz
@given(supports(), st.integers(0, 2**32))
def test_forward_and_backward(backend, case, seed):
    logits, values, ids, offsets, temperature = case
    entries = backend.support_log_softmax(logits, ids, offsets, temperature)
    grad_entries = np.random.default_rng(seed).normal(size=ids.size)
    grad = np.zeros_like(logits)
    backend.support_log_softmax_backward(entries, grad_entries, ids, offsets, temperature, grad)
    found = naive.decode(grad)
    for row in range(len(logits)):
        part = slice(offsets[row], offsets[row + 1])
        kept = ids[part]
        if np.isneginf(values[row][kept]).all():
            assert np.isnan(entries[part]).all()
            continue
        oracle = naive_trainer.log_softmax(values[row], temperature[row], kept)
        scale = np.abs(np.where(np.isfinite(oracle[kept]), oracle[kept], 0)).max()
        same = np.isneginf(oracle[kept]) & np.isneginf(entries[part])
        with np.errstate(invalid="ignore"):
            assert (same | (np.abs(entries[part] - oracle[kept]) <= 1e-15 * (10 + scale))).all()
        g = np.zeros(values.shape[1], np.longdouble)
        g[kept] = grad_entries[part]
        expected = np.where(np.isin(np.arange(g.size), kept), g - np.exp(oracle) * g.sum(), 0) / temperature[row]
        # The exponential of a log-probability of size s has a relative error of s epsilons.
        least = 1e-15 * (20 + kept.size) * (10 + min(scale, 745)) * np.abs(g).max() / temperature[row]
        relative, tiny = {"float64": (0, 0), "float32": (2**-24, 2**-150), "float16": (2**-11, 2**-25)}.get(
            logits.dtype.name, (2**-8 * (1 + 2**-15), 2**-134)
        )
        outside = np.abs(expected) > 60000
        close = np.abs(found[row] - expected) <= np.abs(expected) * relative * 1.001 + tiny + least
        assert (close | (outside & (logits.dtype == np.float16))).all()


def test_an_entry_near_zero_is_right_to_its_last_digit(backend):
    """log p of a token with 1 - 1e-20: -1e-20, where a sum of probabilities would give 0."""
    logits = np.array([[50.0, 50 + np.log(1e-20)]])
    entries = backend.support_log_softmax(logits, np.array([0, 1], np.int32), np.array([0, 2]), np.ones(1))
    assert entries[0] == pytest.approx(-1e-20, rel=1e-13, abs=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_far_from_zero_no_digit_is_lost(backend, dtype):
    """Neighbours around 1e30 over a temperature like their distance: divided before they are subtracted, they'd have
    half as many digits as a float64."""
    top = dtype(1e30)
    logits = np.array([[top, np.nextafter(top, dtype(0)), top * dtype(1 - 2**-22), top * dtype(1 - 2**-18)]])
    temperature = float(np.spacing(top)) / 3
    exact = [(Fraction(float(x)) - Fraction(float(top))) / Fraction(temperature) for x in logits[0]]
    rest = [float(score - Fraction(float(score))) for score in exact]
    scores = np.array([float(score) for score in exact], np.longdouble) + np.array(rest, np.longdouble)
    want = scores - np.log1p(np.exp(scores[1:]).sum())
    ids, offsets = np.arange(4, dtype=np.int32), np.array([0, 4])
    entries = backend.support_log_softmax(logits, ids, offsets, np.array([temperature]))
    assert (np.abs(entries - want) <= 4 * np.spacing(np.abs(want).astype(np.float64))).all()
    oracle = naive_trainer.log_softmax(logits[0], temperature, ids)
    assert (np.abs(oracle - want) <= np.spacing(np.abs(want).astype(np.float64))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_strided_rows_are_read_in_place(backend, dtype):
    logits, ids, offsets, temperature = a_case(dtype)
    wide = np.full((8, 60), np.nan, dtype)
    wide[::2, 5:55] = logits
    expected = backend.support_log_softmax(logits, ids, offsets, temperature)
    assert backend.support_log_softmax(wide[::2, 5:55], ids, offsets, temperature).tolist() == expected.tolist()


def test_nothing_but_the_supports_is_read_or_written(backend):
    logits, ids, offsets, temperature = a_case()
    rows = np.repeat(np.arange(4), np.diff(offsets))
    held = np.zeros(logits.shape, bool)
    held[rows, ids] = True
    poisoned = np.where(held, logits, np.nan)
    entries = backend.support_log_softmax(poisoned, ids, offsets, temperature)
    assert entries.tolist() == backend.support_log_softmax(logits, ids, offsets, temperature).tolist()
    grad = np.full(logits.shape, 7.0)
    backend.support_log_softmax_backward(entries, np.ones(ids.size), ids, offsets, temperature, grad)
    assert (grad[~held] == 7).all()
    assert (grad[held] != 7).all()


def test_greedy_rows_are_zero_without_a_gradient(backend):
    logits = np.array([[1.0, -np.inf, np.nan]])
    for token in range(3):
        ids, offsets = np.array([token], np.int32), np.array([0, 1])
        assert backend.support_log_softmax(logits, ids, offsets, np.zeros(1)).tolist() == [0.0]
        grad = np.zeros((1, 3))
        backend.support_log_softmax_backward(np.zeros(1), np.ones(1), ids, offsets, np.zeros(1), grad)
        assert not grad.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_log_softmax_makes_nan_is_nan(backend, bad):
    logits = np.array([[1.0, bad, 2.0], [1.0, 0.0, 2.0]])
    ids, offsets = np.array([0, 1, 2, 0, 1, 2], np.int32), np.array([0, 3, 6])
    entries = backend.support_log_softmax(logits, ids, offsets, np.ones(2))
    assert np.isnan(entries[:3]).any()
    assert np.isfinite(entries[3:]).all()


def test_no_rows(backend):
    entries = backend.support_log_softmax(np.empty((0, 9)), np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0))
    assert entries.size == 0
    assert backend.row_sums(entries, np.zeros(1, np.int64)).size == 0


@fuzz
@given(st.lists(st.integers(0, 300), max_size=5), st.integers(0, 2**32))
def test_row_sums(backend, sizes, seed):
    offsets = np.cumsum([0, *sizes])
    entries = np.random.default_rng(seed).normal(size=offsets[-1]) * 10.0 ** (seed % 7)
    sums = backend.row_sums(entries, offsets)
    for row, size in enumerate(sizes):
        part = entries[offsets[row] : offsets[row + 1]]
        assert abs(sums[row] - part.astype(np.longdouble).sum()) <= 1e-15 * (1 + size / 32) * np.abs(part).sum()


@pytest.mark.parametrize("name", device_replay.CASES)
def test_cases(backend, name):
    device_replay.check_case(backend, name)


@pytest.mark.gpu
def test_out_of_range_values_are_harmless_on_a_device():
    device_replay.check_out_of_range(DEVICE)


@pytest.mark.gpu
def test_bad_arguments_on_a_device():
    for call, message in device_replay.check_arguments(DEVICE.up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_a_graph_of_all_three():
    logits, ids, offsets, temperature = a_case()
    other = logits[::-1].copy()
    x, supports = DEVICE.up(logits), [DEVICE.up(array) for array in (ids, offsets, temperature)]
    entries, sums, grad = DEVICE.up(np.zeros(ids.size)), DEVICE.up(np.zeros(4)), DEVICE.up(np.zeros(logits.shape))

    def call():
        support_log_softmax(x, *supports, out=entries)
        row_sums(entries, supports[1], out=sums)
        support_log_softmax_backward(entries, entries, *supports, grad)

    device_graph.replay(call, lambda: x.set(other))
    want, expected = support_log_softmax(other, ids, offsets, temperature), np.zeros(logits.shape)
    support_log_softmax_backward(want, want, ids, offsets, temperature, expected)
    for got, wanted in ((entries, want), (sums, row_sums(want, offsets)), (grad, expected)):
        np.testing.assert_array_equal(DEVICE.down(got), wanted)


def test_exponential_and_logarithm():
    """Within 1 and 4 ulp of extended precision, from the least subnormal to the largest number."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-746, 710, 20_000), -(10.0 ** rng.uniform(-20, 2.8, 20_000)), rng.normal(size=9)])
    with np.errstate(all="ignore"):
        want = np.exp(x.astype(np.longdouble))
        ulp = np.spacing(want.astype(np.float64)).astype(np.longdouble)
        ours = np.array([exp64(value) for value in x])
    finite = want <= np.finfo(np.float64).max
    assert (np.abs(ours - want)[finite] <= ulp[finite]).all()
    assert np.isinf(ours[~finite]).all()
    assert [exp64(value) for value in (-np.inf, -800.0, 0.0, -0.0, 711.0, np.inf)] == [0, 0, 1, 1, np.inf, np.inf]
    assert np.isnan(exp64(np.nan))
    x = np.concatenate([10.0 ** rng.uniform(-320, 6, 20_000), rng.uniform(0, 2, 20_000), [0.0]])
    want = np.log1p(x.astype(np.longdouble))
    ours = np.array([log1p64(value) for value in x])
    assert (np.abs(ours - want) <= 4 * np.spacing(want.astype(np.float64))).all()
    assert np.isnan(log1p64(np.nan))


KERNELS = {
    **{f"forward {name}": (log_softmax_kernel, (name,)) for name in (*DTYPES, "float64")},
    **{f"backward {name}": (backward_kernel, (name,)) for name in (*DTYPES, "float64")},
    "sums": (sums_kernel, ()),
}
EXP_FMAS, LOG_FMAS = 14, 12  # that gpu/replay/arithmetic.py and gpu/weights.py ask for


@pytest.mark.parametrize("case", KERNELS)
def test_what_the_compiler_makes_of_the_kernels(case):
    factory, arguments = KERNELS[case]
    kernel = factory(*arguments)
    facts = analyse(compile_ptx(kernel.function, tuple(kernel.signature.args)))
    assert facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.shared_bytes <= 80
    assert not facts.atomics  # sums have one order
    assert facts.num_loose_products == 0
    assert facts.num_fma == {"forward": EXP_FMAS + LOG_FMAS, "backward": EXP_FMAS, "sums": 0}[case.split()[0]]
    assert facts.registers <= 48  # ten blocks of 128 threads a multiprocessor


def test_rounding_of_every_kind_of_float():
    """float32 to float16 against NumPy, to bfloat16 against torch, for a million bit patterns and their like."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = (rng.normal(size=20_000) * 10.0 ** rng.uniform(-9, 5, 20_000)).astype(np.float32)
    edges = np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 2**-14, 2**-24, 2**-25], np.float32)
    x = np.concatenate([bits, scaled, edges, np.nextafter(edges, np.float32(0))])
    with np.errstate(all="ignore"):
        half = x.astype(np.float16)
    brain = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(x)
    ours = np.array([half_bits(value) for value in x], np.int16)
    assert (ours[number] == half.view(np.int16)[number]).all()
    assert np.isnan(ours.view(np.float16)[~number]).all()
    ours = np.array([bfloat16_bits(value) for value in x], np.uint16)
    assert (ours[number] == brain[number]).all()
    assert np.isnan((ours[~number].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("logits", [[1.0]], "logits=list, expected a NumPy array"),
        ("logits", np.zeros(50), r"logits=\(50,\), expected a NumPy array of shape \[R, V\]"),
        ("logits", np.zeros((4, 50), np.int32), "logits.dtype=int32, expected float32"),
        ("logits", np.zeros((4, 100))[:, ::2], "logits.strides=.*expected adjacent tokens"),
        ("logits", np.zeros((4, 50))[::-1], "logits.strides=.*expected adjacent tokens and forward rows"),
        ("logits", np.zeros((3, 50)), r"offsets=int64\[5\], expected a NumPy array int64\[4\]"),
        ("logits", np.zeros((4, 5)), r"token_ids\[\d+\]=\d+, expected an id in 0\.\.4"),
        ("token_ids", np.zeros(37, np.int64), r"token_ids=int64\[37\], expected a NumPy array int32\[37\]"),
        ("offsets", np.array([0, 3, 2, 30, 37]), "offsets=.*, expected ascending offsets from 0 to 37"),
        ("temperature", np.array([1, 1, -1, 1.0]), r"temperature\[2\]=-1.0, expected a finite number from 0"),
        ("temperature", np.array([1, 1, np.nan, 1]), r"temperature\[2\]=nan, expected a finite number"),
        ("temperature", np.array([0, 0, 1.0, 1]), r"temperature\[0\]=0.0, expected at least 1e-5 where the support"),
    ],
)
def test_refused_arguments(name, value, match):
    arguments = dict(zip(("logits", "token_ids", "offsets", "temperature"), a_case(), strict=True)) | {name: value}
    with pytest.raises(ValueError, match=match):
        support_log_softmax(**arguments)


def test_a_gradient_that_cannot_be_written_is_refused():
    logits, ids, offsets, temperature = a_case()
    entries = support_log_softmax(logits, ids, offsets, temperature)
    frozen = np.zeros_like(logits)
    frozen.flags.writeable = False
    for grad in (frozen, np.zeros((4, 60))[:, :50]):
        with pytest.raises(ValueError, match="grad_logits=a view, expected a C-contiguous array"):
            support_log_softmax_backward(entries, entries, ids, offsets, temperature, grad)
    with pytest.raises(ValueError, match=r"grad_entries=float64\[36\], expected"):
        support_log_softmax_backward(entries, entries[1:], ids, offsets, temperature, np.zeros_like(logits))
