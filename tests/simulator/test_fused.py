"""Rounds in one kernel, in the simulator: the host twin's bits, whatever a block reads at a time."""

from unittest import mock

import numpy as np
import pytest

from gpu.rounds import device as rounds_device
from tests.backends import HOST, assert_same
from tests.rounds import make_proposal, make_round
from tests.simulator.backend import Simulated

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # silent where float64 isn't NumPy's


@pytest.mark.parametrize(
    ("batch", "width", "size", "dtype", "threads", "readers", "span", "of_proposal", "skew"),
    [
        (2, 3, 2500, "float32", 32, 2, 2, None, 3),  # early rows of three spans, the last of one chunk
        (3, 2, 2000, "bfloat16", 32, 2, 4, "float16", 9),  # a span is a row
        (1, 3, 1100, "float16", 64, 40, 4, None, 0),  # no early row
        (4, 1, 300, "bfloat16", 64, 1, 1, "float32", 0),  # a chunk is a row, and a row a request
    ],
)
def test_fused_rounds_are_the_host_twins(batch, width, size, dtype, threads, readers, span, of_proposal, skew):
    backend = Simulated(threads, skew, fused=True)
    round_ = make_round(size + skew, batch, width, size, dtype)
    exact = HOST.select_support(round_.rows, *round_.parameters, capacity=size)
    proposal = None if of_proposal is None else make_proposal(7, round_, exact, of_proposal)
    arguments = (
        round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, size // 2,
        proposal,
    )  # fmt: skip
    options = {"filter_order": ("joint", "top_k_first")[batch % 2], "capacity": size if skew else 50}
    want, reading_of = HOST.run_round(*arguments, **options), rounds_device.reading_of
    with mock.patch.object(
        rounds_device, "reading_of", lambda rows, chunks, _: reading_of(rows, chunks, readers, span)
    ):
        results = backend.run_round(*arguments, **options)
    for got, expected in zip(results, want, strict=True):
        assert_same(got, expected)
