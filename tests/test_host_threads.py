"""Rounds of few logits leave Numba's other threads asleep."""

import numba
import pytest

from pipeline import SamplingParams
from pipeline.running.host_threads import FEW_LOGITS, threads_for
from tests import pipes

pytestmark = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread is all there is")


@pytest.fixture(autouse=True)
def two_threads():
    before = numba.get_num_threads()
    numba.set_num_threads(2)
    yield
    numba.set_num_threads(before)


def test_threads_are_as_many_as_before():
    for num_logits, wanted in ((0, 1), (FEW_LOGITS, 1), (FEW_LOGITS + 1, 2)):
        with threads_for(num_logits):
            assert numba.get_num_threads() == wanted
        assert numba.get_num_threads() == 2
    with pytest.raises(KeyError), threads_for(1):
        raise KeyError
    assert numba.get_num_threads() == 2


@pytest.mark.parametrize(("few", "wanted"), [(2 * 4 * 320, 1), (2 * 4 * 320 - 1, 2)])
def test_a_round_counts_its_logits(few, wanted, monkeypatch):
    """Two requests, blocks of four rows, 320 tokens."""
    monkeypatch.setattr("pipeline.running.host_threads.FEW_LOGITS", few)
    pipe, seen = pipes.pipe(max_batch=2), []
    pipe.observe("verify", lambda verified: seen.append(numba.get_num_threads()))
    for prompt in ([4, 7, 5], [4, 8]):
        pipe.submit(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True, seed=0))
    pipe.step()
    assert set(seen) == {wanted}
    assert numba.get_num_threads() == 2
