"""The fuzzed checks over whole vocabularies, on a device: a row of these costs what a hundred small ones do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import FILTER_ORDERS
from tests.backends import DEVICE
from tests.strategies import fuzz, row_batches
from tests.test_gpu_capture import check_capture
from tests.test_gpu_filter import check_support
from tests.test_gpu_verify import check_verdict, rounds

pytestmark = pytest.mark.gpu
VOCABULARIES = (151_936, 248_320)
few = settings(fuzz, max_examples=max(30, fuzz.max_examples // 10))
orders = st.sampled_from(FILTER_ORDERS)


@few
@given(rows=row_batches(vocabularies=VOCABULARIES), order=orders)
def test_support_is_the_oracles(rows, order):
    check_support(DEVICE, rows=rows, order=order)


@few
@given(case=rounds(VOCABULARIES), order=orders)
def test_verdict_is_the_oracles(case, order):
    check_verdict(DEVICE, case=case, order=order)


@few
@given(
    case=rounds(VOCABULARIES),
    order=orders,
    capacity=st.sampled_from([1, 4096]),
    wanted=st.lists(st.booleans(), min_size=1, max_size=3),
    max_support=st.sampled_from([64, 4096, 300_000]),
)
def test_capture_is_the_oracles(case, order, capacity, wanted, max_support):
    check_capture(DEVICE, case=case, order=order, capacity=capacity, wanted=wanted, max_support=max_support)
