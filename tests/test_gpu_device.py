"""What only a device has: full batches of full vocabularies, repeats, streams, CUDA graphs, and its own door."""

import numpy as np
import pytest

from gpu import FILTER_ORDERS, Capture, Support, Verdict, capture_masks, select_support, verify_chain
from gpu.verification.chain import THREADS
from tests.backends import DEVICE, HOST, assert_same
from tests.device_door import CASES, call
from tests.rounds import assert_same_rows, in_gaps, make_proposal, make_round, run_round
from tests.strategies import DTYPES, cast, landscape

pytestmark = pytest.mark.gpu
MAX_SUPPORT = 4096


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "width", "size"), [(32, 8, 151936), (8, 8, 248320), (40, 6, 262144), (1, 1, 248320)])
def test_full_batches_are_the_host_twins(batch, width, size, dtype):
    round_ = make_round(batch + width, batch, width, size, dtype, num_poisoned=4 * (width > 1))
    for order in FILTER_ORDERS:
        run_round(DEVICE, round_, order, MAX_SUPPORT, 1000)


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 31, 33, 257, 4099, 32001, 65537])
def test_rounds_are_the_host_twins(size, dtype, order):
    """Any width up to 8, proposals of every dtype, entries that fit and rows that are walked."""
    for seed, (batch, width) in enumerate([(1, 1), (5, 1), (2, 8), (6, 4)]):
        round_ = make_round(seed + size, batch, width, size, dtype)
        exact = HOST.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=size)
        proposal = make_proposal(seed, round_, exact, DTYPES[(seed + size) % 3])
        for capacity in (size, 1 + size // 50):
            run_round(DEVICE, round_, order, capacity, max(1, size // (1 + seed)))
            run_round(DEVICE, round_, order, capacity, size, proposal)
            run_round(DEVICE, round_, order, capacity, size, proposal, threshold_single=0.6, threshold_acc=0.8)


@pytest.mark.parametrize("width", [33, 64, THREADS])
def test_long_blocks_are_the_host_twins(width):
    """Laws near the policies, so that scales stay up; entries, and rows walked. Beyond 64 rows a round is apart."""
    size = 300
    round_ = make_round(width, 3, width, size, "float32", num_poisoned=0, greedy=0)
    round_.logits[:] = np.random.default_rng(width).normal(size=round_.logits.shape)
    for values, value in zip(round_.parameters, (1, 0, 1, 0), strict=True):
        values[:] = value
    laws = np.exp(round_.logits[:, :-1] + np.float32(0.02) * round_.logits[:, 1:])
    laws /= laws.sum(-1, keepdims=True)
    round_.num_drafts[:], round_.coins[0][:] = width - 1, 0.999
    for capacity in (size, size - 1):
        _, verdict, _ = run_round(DEVICE, round_, "top_k_first", capacity, size, laws)
        assert (verdict.bounds > 0.1).mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "capacity"), [(248320, MAX_SUPPORT), (151936, 16), (65537, 3000), (4099, 4099)])
def test_rows_without_top_k_are_the_host_twins(size, capacity, dtype):
    """Likely tokens few and many, flat rows and ties at every cutoff, more of them than a window holds."""
    rng = np.random.default_rng(size + capacity)
    peaked = landscape("normal", size, rng) * np.float32(2)
    peaked[rng.choice(size, 300)] += np.float32(12)
    kinds = ["normal"] * 4 + ["flat", "ties", "zipf", "wide_plateau", "holes", "few_values", "steps", "masked"]
    x = np.stack([peaked, *(landscape(kind, size, rng) for kind in kinds)])
    width = len(x)
    policies = [(1, 0.95, 0), (1, 1, 0), (0.3, 0.5, 0), (3, 0.9, 0), (1, 1, 0.05), (0.8, 0.99, 1e-4), (1e30, 0.7, 0)]
    for seed, (temperature, top_p, min_p) in enumerate(policies):
        round_ = make_round(seed, 1, width, size, dtype, num_poisoned=0)
        round_.logits[:] = cast(x, dtype)
        for values, value in zip(round_.parameters, (temperature, 0, top_p, min_p), strict=True):
            values[:] = value
        round_.parameters[1][::5] = 60  # rows of both kinds side by side
        round_.drafts[:], round_.wanted[:] = x.argmax(-1)[:-1], True
        if seed % 2 == 0:
            round_.coins[0][:] = 0  # every draft is accepted, so every mask captured
        for order in FILTER_ORDERS:
            run_round(DEVICE, round_, order, capacity, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [MAX_SUPPORT, 16])
def test_neither_repeats_nor_places_change_a_bit(dtype, capacity):
    round_ = make_round(41, 8, 4, 151936, dtype, num_poisoned=2)
    want = run_round(DEVICE, round_, "top_k_first", capacity, MAX_SUPPORT)
    for _ in range(20):
        for got, first in zip(run_round(DEVICE, round_, "top_k_first", capacity, MAX_SUPPORT), want, strict=True):
            assert_same(got, first)
    for rows in ([5], list(range(31, -1, -1)), [7] * 9, list(range(32)) * 8):
        parameters = [values[rows] for values in round_.parameters]
        for before in (0, 1, 7):
            view = in_gaps(round_.rows[rows], before, 3)
            assert_same_rows(DEVICE.select_support(view, *parameters, capacity=capacity), want[0], rows)


def test_bfloat16_is_its_bits():
    import ml_dtypes

    round_ = make_round(42, 4, 2, 1000, "bfloat16")
    typed = DEVICE.up(round_.rows).view(ml_dtypes.bfloat16)
    parameters = [DEVICE.up(values) for values in round_.parameters]
    support = DEVICE.to_host(select_support(typed, *parameters, capacity=1000))
    assert_same(support, HOST.select_support(round_.rows, *round_.parameters, capacity=1000))


def test_torch_tensors_need_no_copy():
    import cupy
    import torch

    round_ = make_round(43, 2, 2, 500, "float32")
    tensor = torch.from_numpy(round_.rows).cuda()
    array = cupy.from_dlpack(tensor)
    assert array.data.ptr == tensor.data_ptr()
    parameters = [DEVICE.up(values) for values in round_.parameters]
    support = DEVICE.to_host(select_support(array, *parameters, capacity=500))
    assert_same(support, HOST.select_support(round_.rows, *round_.parameters, capacity=500))


class Buffers:
    """A round's device arrays and results, in memory that stays where it is."""

    def __init__(self, round_, capacity, proposal, whole_rows=False):
        self.whole_rows = whole_rows
        self.logits = DEVICE.up(round_.logits)
        self.rows = self.logits.reshape(-1, self.logits.shape[-1])
        self.parameters = [DEVICE.up(values) for values in round_.parameters]
        self.drafts, self.num_drafts = DEVICE.up(round_.drafts), DEVICE.up(round_.num_drafts)
        self.coins = [DEVICE.up(values) for values in round_.coins]
        self.wanted = DEVICE.up(round_.wanted)
        self.proposal = None if proposal is None else DEVICE.up(proposal)
        self.capacity = capacity
        self.support = self.verdict = self.masks = None

    def write(self, round_, proposal):
        """Another round of the same shapes."""
        self.logits.set(round_.logits)
        for mine, new in zip(self.parameters, round_.parameters, strict=True):
            mine.set(new)
        self.drafts.set(round_.drafts)
        self.num_drafts.set(round_.num_drafts)
        for mine, new in zip(self.coins, round_.coins, strict=True):
            mine.set(new)
        self.wanted.set(round_.wanted)
        if self.proposal is not None:
            self.proposal.set(proposal)

    def select_support(self):
        self.support = select_support(
            self.rows, *self.parameters, filter_order="joint", capacity=self.capacity, whole_rows=self.whole_rows,
            out=self.support,
        )  # fmt: skip

    def verify_chain(self):
        self.verdict = verify_chain(
            self.logits, self.support, self.drafts, self.num_drafts, *self.coins, self.proposal, out=self.verdict
        )

    def capture_masks(self):
        self.masks = capture_masks(self.logits, self.support, self.verdict, self.wanted, MAX_SUPPORT, out=self.masks)


STEPS = ("select_support", "verify_chain", "capture_masks")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("proposes", "whole_rows"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("captured", [*((step,) for step in STEPS), STEPS], ids="+".join)
def test_a_graph_replays_on_new_data(captured, proposes, whole_rows, dtype):
    import cupy
    import torch

    size, capacity = 32001, 2000
    rounds = [make_round(seed, 6, 4, size, dtype) for seed in range(50, 54)]
    exact = [HOST.select_support(r.rows, *r.parameters, filter_order="joint", capacity=size) for r in rounds]
    proposals = [
        make_proposal(50, round_, support, "float32") if proposes else None
        for round_, support in zip(rounds, exact, strict=True)
    ]
    buffers = Buffers(rounds[0], capacity, proposals[0], whole_rows)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        for step in STEPS:  # allocates, and compiles
            getattr(buffers, step)()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for step in captured:
                getattr(buffers, step)()
        for round_, proposal in zip([*rounds[1:], rounds[1]], [*proposals[1:], proposals[1]], strict=True):
            buffers.write(round_, proposal)
            for step in STEPS:
                if step not in captured:
                    getattr(buffers, step)()
                elif step == captured[0]:
                    graph.replay()
            stream.synchronize()
            want = run_round(HOST, round_, "joint", capacity, MAX_SUPPORT, proposal)
            for got, expected in zip((buffers.support, buffers.verdict, buffers.masks), want, strict=True):
                assert_same(DEVICE.to_host(got), expected)


def test_it_works_on_the_current_stream():
    import cupy

    round_ = make_round(44, 4, 2, 32001, "bfloat16")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        run_round(DEVICE, round_, "top_k_first", 100, 32001)
        stream.synchronize()


def test_results_are_written_into_out():
    round_ = make_round(45, 3, 2, 700, "float16")
    buffers = Buffers(round_, 700, None)
    for step in STEPS * 2:
        before = buffers.support, buffers.verdict, buffers.masks
        getattr(buffers, step)()
        if None in before:
            continue
        for old, new, name in zip(before, (buffers.support, buffers.verdict, buffers.masks),
                                  ("token_ids", "tokens", "token_ids"), strict=True):  # fmt: skip
            assert getattr(old, name).data.ptr == getattr(new, name).data.ptr
    assert [type(record) for record in (buffers.support, buffers.verdict, buffers.masks)] == [Support, Verdict, Capture]


@pytest.mark.parametrize(("function", "change", "message"), CASES)
def test_bad_arguments(function, change, message):
    call(function, lambda up: {}, DEVICE.up)
    with pytest.raises(ValueError, match=message):
        call(function, change, DEVICE.up)


def test_device_arguments_beside_host_logits():
    ones = np.ones(2, np.float32)
    with pytest.raises(ValueError, match=r"temperature=ndarray, expected a NumPy array float32\[2\]"):
        select_support(np.zeros((2, 4), np.float32), DEVICE.up(ones), np.zeros(2, np.int32), ones, capacity=4)


def test_a_round_wider_than_a_block():
    size, width = 4, THREADS + 1
    round_ = make_round(46, 1, width, size, "float32")
    with pytest.raises(ValueError, match=f"width={width}, expected 1..{THREADS} rows a request on a device"):
        run_round(DEVICE, round_, "joint", size, size)
