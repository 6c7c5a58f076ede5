"""The soak, shortened; ``make soak`` runs it whole."""

import pytest

from tests import soak


@pytest.mark.parametrize(("name", "make", "faulty"), soak.ARMS, ids=[arm[0] for arm in soak.ARMS])
def test_every_request_ends_once_and_nothing_stays(name, make, faulty):
    ends = soak.soak(make(), 600, faulty=faulty)
    assert set(ends) >= {"refused", "cancelled", "stop", "eos", "length", "overflow", "invalid"}
    assert ends.total() > 780


def test_a_leak_would_be_seen():
    pipe, kept = soak.pipe_of(False), []
    pipe.observe("finish", kept.append)
    with pytest.raises(AssertionError, match="requests outlive their end"):
        soak.soak(pipe, 50)
