"""Every failure that fuzzing ever found and shrank, again; and the keeping of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import cases, strategies
from tests import test_gpu_capture as _capture  # noqa: F401 (their checks enter cases.CHECKS)
from tests import test_gpu_filter as _filter  # noqa: F401
from tests import test_gpu_verify as _verify  # noqa: F401
from tests.strategies import FAR, LANDSCAPES, landscape, row_batches


@pytest.mark.parametrize("path", sorted(cases.FOLDER.glob("*.npz")), ids=lambda path: path.stem)
def test_kept_failures_stay_fixed(backend, path):
    check, arguments = cases.load(path)
    check(backend, **arguments)


def test_all_checks_are_known():
    assert set(cases.CHECKS) >= {"support", "verdict", "capture"}


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    monkeypatch.setattr(cases, "CHECKS", {})
    monkeypatch.setattr(cases, "_written", {})
    return tmp_path


def test_a_failure_is_kept_as_small_as_hypothesis_makes_it(own_folder):
    @cases.keeps_failures
    def check_no_ten(backend, rows, numbers):
        assert rows.logits.shape[1] < 10 or 10 not in numbers

    @settings(derandomize=True, database=None, max_examples=2000)
    @given(rows=row_batches(), numbers=st.lists(st.integers(0, 20)))
    def fuzzed(rows, numbers):
        check_no_ten(None, rows=rows, numbers=numbers)

    with pytest.raises(AssertionError):
        fuzzed()
    (path,) = own_folder.iterdir()  # one, not one a step of shrinking
    check, arguments = cases.load(path)
    assert arguments["numbers"] == [10]
    assert arguments["rows"].logits.shape == (1, 31)
    with pytest.raises(AssertionError):
        check(None, **arguments)


def test_arguments_come_back_as_they_were(own_folder):
    @cases.keeps_failures
    def check_anything(backend, **arguments):
        raise ValueError

    rng = np.random.default_rng(0)
    rows = strategies.Rows(*(rng.random((2, 3)).astype(kind) for kind in ("f2", "f4", "i4", "f4", "f4")))
    case = rows, 3, np.int32(2), [rng.random(2), None], (True, "joint", 0.5)
    with pytest.raises(ValueError):  # noqa: PT011
        check_anything(None, case=case, none=None)
    ((_, held),) = (cases.load(path) for path in own_folder.iterdir())
    (got, *numbers, coins, rest), none = held["case"], held["none"]
    for one, other in zip(got.filter_arguments(), rows.filter_arguments(), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(coins[0], case[3][0])
    assert (numbers, coins[1], rest, none) == ([3, 2], None, [True, "joint", 0.5], None)


@pytest.mark.parametrize("kind", LANDSCAPES + FAR)
@pytest.mark.parametrize("size", [1, 2, 31, 257])
def test_a_landscape_is_float32_and_has_a_finite_logit(kind, size):
    for seed in range(20):
        x = landscape(kind, size, np.random.default_rng(seed))
        assert (x.dtype, x.shape) == (np.float32, (size,))
        assert np.isfinite(x).any()
        assert not np.isnan(x).any()
        assert not (x == np.inf).any()
