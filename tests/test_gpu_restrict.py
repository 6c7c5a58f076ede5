"""restrict_logits against the oracle on the host, and its CUDA kernel: against the host, and what becomes of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import restrict_logits
from gpu.adjust.restrict_kernel import restrict_kernel
from tests import device_graph, device_restrict, naive
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx
from tests.strategies import DTYPES, VOCABULARIES, fuzz


@fuzz
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 3),
    width=st.integers(1, 4),
    size=st.sampled_from(VOCABULARIES[:-1]),
    num_masks=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    pad=st.integers(0, 3),
)
def test_a_row_is_the_oracles(seed, batch, width, size, num_masks, dtype, share, pad):
    rng = np.random.default_rng(seed)
    x, allowed, rows = device_restrict.random_case(rng, batch, width, size, num_masks, dtype, share)
    wide = np.pad(x, ((0, 0), (0, 0), (pad, 1)), constant_values=7)
    restrict_logits(wide[..., pad : pad + size], allowed, rows)
    for b in range(batch):
        for i in range(width):
            want = naive.decode(x[b, i])
            want = want if rows[b, i] < 0 else naive.restrict(want, allowed[rows[b, i]])
            np.testing.assert_array_equal(naive.decode(wide[b, i, pad : pad + size]), want)
    assert (wide[..., :pad] == 7).all()
    assert (wide[..., -1] == 7).all()


def test_xgrammars_own_mask_reads_the_same():
    import torch
    import xgrammar

    rng = np.random.default_rng(0)
    allowed = rng.integers(-(2**31), 2**31, (2, 4), np.int32)
    x = rng.normal(size=(2, 1, 100)).astype(np.float32)
    want = torch.from_numpy(x[:, 0].copy())
    xgrammar.apply_token_bitmask_inplace(want, torch.from_numpy(allowed), vocab_size=100)
    restrict_logits(x, allowed, np.array([[0], [1]], np.int32))
    np.testing.assert_array_equal(x[:, 0], want.numpy())


@pytest.mark.parametrize("number", range(5))
def test_bad_arguments_on_the_host(number):
    call, message = list(device_restrict.check_arguments(np.asarray))[number]
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_out_of_range_on_the_host():
    with pytest.raises(ValueError, match=r"rows\[0, 1\]=1, expected a mask below 1, or -1 for none"):
        restrict_logits(np.zeros((1, 2, 8), np.float32), np.zeros((1, 1), np.int32), np.array([[0, 1]], np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", device_restrict.CASES)
def test_cases_are_the_hosts(name):
    device_restrict.check_case(up, down, name)


@pytest.mark.gpu
def test_what_is_out_of_range_is_skipped():
    device_restrict.check_what_is_out_of_range(up, down)


@pytest.mark.gpu
def test_bad_arguments():
    for call, message in device_restrict.check_arguments(up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
@fuzz
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    width=st.integers(1, 9),
    size=st.sampled_from([1, 33, 32001, 151_936]),
    num_masks=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    pad=st.integers(0, 3),
)
def test_any_rows_are_the_hosts(**arguments):
    device_restrict.check(up, down, **arguments)


@pytest.mark.gpu
def test_a_graph():
    rng = np.random.default_rng(3)
    first, (x, allowed, rows) = (device_restrict.random_case(rng, 2, 3, 500, 3, "float32") for _ in range(2))
    logits, *on_device = map(up, first)

    def change():
        for own, values in zip((logits, *on_device), (x, allowed, rows), strict=True):
            own.set(values)

    device_graph.replay(lambda: restrict_logits(logits, *on_device), change)
    restrict_logits(x, allowed, rows)
    np.testing.assert_array_equal(down(logits).view(np.int32), x.view(np.int32))


@pytest.mark.parametrize("name", DTYPES)
def test_the_kernel_is_small(name):
    kernel = restrict_kernel(name)
    facts = analyse(compile_ptx(kernel.function, kernel.signature))
    assert facts.num_fma == facts.num_f64 == facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.shared_bytes == 0
    assert facts.registers <= 32  # eight blocks of 256 threads a multiprocessor
