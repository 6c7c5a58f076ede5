"""The soak, shortened; ``make soak`` runs it whole."""

import pytest

from tests import pipes, soak


@pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
def test_every_request_ends_once_and_nothing_stays(speculative):
    pipe = pipes.pipe(speculative, 31, max_batch=16, max_length=64, max_support=soak.OVERFLOWS)
    ends = soak.soak(pipe, 1000 if speculative else 600)
    assert set(ends) >= {"refused", "cancelled", "stop", "eos", "length", "overflow", "invalid"}
    assert ends.total() > (1300 if speculative else 780)


def test_a_leak_would_be_seen():
    pipe, kept = pipes.pipe(False, 31, max_batch=16, max_length=64, max_support=soak.OVERFLOWS), []
    pipe.observe("finish", kept.append)
    with pytest.raises(AssertionError, match="a request outlives its end"):
        soak.soak(pipe, 50)
