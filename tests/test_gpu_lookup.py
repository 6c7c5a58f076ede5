"""prompt_lookup against the oracle on the host, and its CUDA kernel: against the host, and what becomes of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import prompt_lookup
from gpu.lookup.kernel import lookup_kernel
from tests import device_graph, device_lookup, naive
from tests.device_arrays import down, up
from tests.ptx import analyse, compile_ptx
from tests.strategies import fuzz


@fuzz
@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4),
    num_drafts=st.integers(0, 9),
    max_ngram=st.integers(1, 5),
    min_ngram=st.integers(1, 5),
)
def test_drafts_are_the_oracles(rows, num_drafts, max_ngram, min_ngram):
    max_ngram = max(max_ngram, min_ngram)
    tokens = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    drafts, counts = prompt_lookup(tokens, lengths, num_drafts, max_ngram=max_ngram, min_ngram=min_ngram)
    for b, row in enumerate(rows):
        want = naive.lookup(row, num_drafts, max_ngram, min_ngram)
        assert counts[b] == len(want)
        assert drafts[b].tolist() == want + [0] * (num_drafts - len(want))


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 7, 3, 2, 8, 1, 2], [7, 3, 2]),  # the longest match
        ([2, 7, 2, 8, 2], [8, 2, 8]),  # the latest, and its period goes on
        ([4, 4], [4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_by_hand(tokens, drafts):
    found, counts = prompt_lookup(
        np.array([tokens], np.int32).reshape(1, -1), np.array([len(tokens)], np.int32), 3, max_ngram=3
    )
    assert found[0, : counts[0]].tolist() == drafts


@pytest.mark.parametrize("number", range(7))
def test_bad_arguments_on_the_host(number):
    call, message = list(device_lookup.check_arguments(np.asarray))[number]
    with pytest.raises(ValueError, match=message):
        call()


def test_lengths_out_of_range_on_the_host():
    with pytest.raises(ValueError, match=r"lengths\[1\]=4, expected 0..3"):
        prompt_lookup(np.zeros((2, 3), np.int32), np.array([3, 4], np.int32), 1, max_ngram=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", device_lookup.CASES)
def test_cases_are_the_hosts(name):
    device_lookup.check_case(up, down, name)


@pytest.mark.gpu
def test_lengths_out_of_range():
    device_lookup.check_lengths_out_of_range(up, down)


@pytest.mark.gpu
def test_bad_arguments():
    for call, message in device_lookup.check_arguments(up):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_a_graph():
    tokens, lengths = np.array([[1, 2, 3, 1, 2, 3, 3, 9]], np.int32), np.array([5], np.int32)
    on_device, out = [up(tokens), up(lengths)], (up(np.zeros((1, 4), np.int32)), up(np.zeros(1, np.int32)))
    device_graph.replay(
        lambda: prompt_lookup(*on_device, 4, max_ngram=3, out=out), lambda: on_device[1].set(lengths + 2)
    )
    drafts, counts = prompt_lookup(tokens, lengths + 2, 4, max_ngram=3)
    np.testing.assert_array_equal(down(out[0]), drafts)
    np.testing.assert_array_equal(down(out[1]), counts)


@pytest.mark.gpu
@fuzz
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 40),
    longest=st.sampled_from([1, 2, 33, 300, 5000]),
    alphabet=st.sampled_from([1, 2, 10, 1000]),
    num_drafts=st.integers(0, 16),
    max_ngram=st.integers(2, 8),
    min_ngram=st.integers(1, 2),
)
def test_any_contexts_are_the_hosts(**arguments):
    device_lookup.check(up, down, **arguments)


def test_the_kernel_keeps_nothing_in_local_memory():
    kernel = lookup_kernel()
    facts = analyse(compile_ptx(kernel.function, kernel.signature))
    assert facts.num_fma == facts.num_f64 == facts.num_local == facts.stack_bytes == facts.spill_bytes == 0
    assert facts.shared_bytes == 8
    assert facts.registers <= 40
