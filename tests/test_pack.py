"""A block taken apart by request where some of its rows failed: who fails, with which words, and who goes on."""

from types import SimpleNamespace

import numpy as np

import gpu
from pipeline import SamplingParams
from pipeline.batch.request import Request
from pipeline.batch.stopping import StopScanner
from pipeline.options import Options
from pipeline.stages.finish import Finish
from pipeline.stages.pack import BlockRows, pack_rows

WIDTH = 3
GOOD, INVALID, OVERFLOW, FAILED, PLAIN = range(5)
TOKENS = np.arange(5 * WIDTH, dtype=np.int32).reshape(5, WIDTH)
LOGPROBS = -TOKENS.astype(np.float32)


def make_request(slot):
    params = SamplingParams(top_k=4, seed=slot, return_sampling_mask=slot != PLAIN, sampling_logprobs="support")
    scanner = StopScanner(params, frozenset(), None)
    return Request(SimpleNamespace(token_ids=np.arange(2), index=slot), 0, params, 0, slot, scanner, slot=slot)


def block():
    """INVALID fails at row 1, OVERFLOW at row 2; every mask has two entries, a token and the one behind it."""
    committed = np.array([3, 1, 3, 2, 2], np.int32)
    verdict = gpu.Verdict(
        num_accepted=np.array([2, 1, 2, 1, 1], np.int32),
        num_committed=committed,
        tokens=np.asfortranarray(TOKENS),  # a verify stage of somebody's own may give any layout
        logprobs=np.asfortranarray(LOGPROBS),
        status=np.array([0, gpu.INVALID, 0, 0, 0], np.uint8),
        error_row=np.array([-1, 1, -1, -1, -1], np.int32),
    )
    rows = [3, 1, 2, 2, 0]  # captured of each
    first = np.concatenate([TOKENS[b, :n] for b, n in enumerate(rows)])
    capture = gpu.Capture(
        status=np.array([0, gpu.INVALID, gpu.OVERFLOW, 0, 0], np.uint8),
        failed_row=np.array([-1, 1, 2, -1, -1], np.int32),
        counts=np.full((5, WIDTH), 9, np.int32),
        row_start=np.concatenate([[0], np.cumsum(rows)]),
        offsets=2 * np.arange(sum(rows) + 1),
        token_ids=np.stack([first, first + 1], axis=1).ravel(),
        logprobs=np.zeros(2 * sum(rows), np.float32),
    )
    return BlockRows(verdict, capture)


def test_rows_that_fail_beside_others_that_do_not():
    requests = [make_request(slot) for slot in range(5)]
    requests[FAILED].fail("failed before")
    packed = pack_rows(block(), enumerate(requests), max_support=8)
    assert [len(chunk) for chunk in packed.chunks] == [3, 1, 2, 0, 2]
    assert packed.num_accepted.tolist() == [2, 1, 2, 1, 1]
    failures = packed.failures
    assert (failures[GOOD], failures[FAILED], failures[PLAIN]) == (None, "failed before", None)
    assert failures[INVALID].startswith("INVALID: the policy of output token 1 has NaN")
    assert failures[OVERFLOW].startswith("OVERFLOW: support=9, expected at most max_support=8")
    for b, chunk in enumerate(packed.chunks):
        first = TOKENS[b, : len(chunk)]
        assert chunk.token_ids.tolist() == first.tolist()
        assert chunk.logprobs.tolist() == LOGPROBS[b, : len(chunk)].tolist()
        if b == PLAIN:
            assert chunk.mask_ids is None
        else:
            assert chunk.mask_sizes.tolist() == [2] * len(chunk)
            assert chunk.mask_ids.reshape(-1, 2).tolist() == [[token, token + 1] for token in first]

    state = SimpleNamespace(
        options=Options(), active=list(requests), dirty=set(), target=SimpleNamespace(tokenizer=None)
    )
    ended = Finish()(state, packed).ended
    assert state.active == [requests[GOOD], None, None, None, requests[PLAIN]]
    assert state.dirty == {INVALID, OVERFLOW, FAILED}
    assert [requests[b].token_ids for b in (GOOD, PLAIN)] == [TOKENS[GOOD].tolist(), TOKENS[PLAIN, :2].tolist()]
    assert [rollout.error for _, rollout in ended] == [failures[b] for b in (INVALID, OVERFLOW, FAILED)]


def test_some_requests_of_a_block():
    """The engine's rounds run over more slots than have a request."""
    requests = {b: make_request(b) for b in (PLAIN, GOOD)}
    packed = pack_rows(block(), requests.items(), max_support=8)
    assert packed.requests == [requests[PLAIN], requests[GOOD]]
    assert [chunk.token_ids.tolist() for chunk in packed.chunks] == [TOKENS[PLAIN, :2].tolist(), TOKENS[GOOD].tolist()]
    assert packed.failures == [None, None]
    assert packed.num_accepted.tolist() == [1, 2]
