"""Filters and rounds in one kernel, in the simulator: the host twin's bits, whatever a block reads at a time."""

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest

from gpu.rounds import device as rounds_device
from gpu.support import device as support_device
from gpu.support.reading import spans_of
from tests.backends import HOST, assert_same
from tests.rounds import make_proposal, make_round
from tests.simulator.backend import Simulated

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # silent where float64 isn't NumPy's


@pytest.mark.parametrize(
    ("batch", "width", "size", "dtype", "readers", "of_proposal", "skew"),
    [
        (2, 2, 1100, "float32", 2, None, 3),  # three chunks a row: early rows in two spans, the last in chunks
        (2, 1, 1100, "bfloat16", 9, "float16", 0),  # no early row
    ],
)
def test_fused_rounds_are_the_host_twins(batch, width, size, dtype, readers, of_proposal, skew):
    backend = Simulated(32, skew, fused=True)
    round_ = make_round(size, batch, width, size, dtype)
    round_.parameters[1][round_.parameters[1] != 1] = 20  # walks of whole rows are slow here
    proposal = None
    if of_proposal is not None:
        exact = HOST.select_support(round_.rows, *round_.parameters, capacity=size)
        proposal = make_proposal(7, round_, exact, of_proposal)
    arguments = (
        round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, size // 2,
        proposal,
    )  # fmt: skip
    options = {"filter_order": ("top_k_first", "joint")[width % 2], "capacity": (50, size)[width % 2]}
    want = HOST.run_round(*arguments, **options)
    taken = partial(spans_of, readers=readers, size=2)
    with ExitStack() as stack:
        for module in (rounds_device, support_device):
            stack.enter_context(mock.patch.object(module, "spans_of", lambda rows, chunks, _: taken(rows, chunks)))
        stack.enter_context(mock.patch.object(support_device, "scan", None))  # the other way isn't gone
        results = backend.run_round(*arguments, **options)  # again and again into the same memory
        if width == 1:
            backend.select_support(round_.rows, *round_.parameters, **options)
    for got, expected in zip(results, want, strict=True):
        assert_same(got, expected)


def test_every_chunk_is_handed_out_once():
    for num_rows, chunks, readers, size in ((256, 16, 264, 4), (8, 16, 264, 4), (40, 5, 9, 2), (1, 1, 1, 8)):
        (grid,), spans = spans_of(num_rows, chunks, readers, size)
        early = spans.early_rows
        assert 0 <= early <= num_rows
        assert spans.early == early * spans.a_row
        assert spans.a_row * size >= chunks > (spans.a_row - 1) * size
        assert spans.total == spans.early + (num_rows - early) * chunks
        assert 1 <= grid - num_rows <= min(readers, spans.total)
        assert spans.asked == spans.total + grid - num_rows
