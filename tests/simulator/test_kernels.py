"""The filter, verification and capture kernels in the simulator, held against their host twins bit for bit."""

import numpy as np
import pytest
from numba import cuda

import gpu
from gpu import FILTER_ORDERS, INVALID, OVERFLOW, Capture, capture_masks, select_support
from gpu.verification.block import scale_of
from tests import test_gpu_filter as both_zeros
from tests.backends import HOST, assert_same
from tests.rounds import assert_same_rows, in_gaps, make_proposal, make_round, run_round
from tests.simulator.backend import Simulated
from tests.strategies import cast, landscape

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # silent where float64 isn't NumPy's
SIMULATED = Simulated()

# batch, width, vocabulary, dtype, of the proposals, order, capacity, skew. A segment of the walk: 256 or 512 logits.
ROUNDS = [
    (2, 8, 257, "float32", "bfloat16", "top_k_first", 257, 0),
    (2, 5, 1100, "float32", "float32", "joint", 7, 3),
    (6, 2, 33, "bfloat16", "float32", "joint", 33, 5),
    (2, 5, 1100, "bfloat16", "float16", "top_k_first", 40, 15),
    (4, 3, 31, "float16", "float16", "top_k_first", 3, 0),
    (3, 3, 600, "float16", "bfloat16", "joint", 1, 9),
    (4, 1, 100, "bfloat16", "float32", "top_k_first", 100, 1),
    (2, 2, 2, "float32", "float32", "joint", 1, 0),
    (1, 2, 1, "bfloat16", "bfloat16", "joint", 1, 7),
]


@pytest.mark.parametrize(("batch", "width", "size", "dtype", "of_proposal", "order", "capacity", "skew"), ROUNDS)
def test_rounds_are_the_host_twins(batch, width, size, dtype, of_proposal, order, capacity, skew):
    backend = Simulated(skew=skew)
    seed = 100 * size + capacity
    round_ = make_round(seed, batch, width, size, dtype, num_poisoned=1 + (width > 3))
    support = backend.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=capacity)
    exact = HOST.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=size)
    arguments = round_.logits, support, round_.drafts, round_.num_drafts, *round_.coins
    verdict = backend.verify_chain(*arguments)
    backend.capture_masks(round_.logits, support, verdict, round_.wanted, 1 + size // 3)
    proposal = make_proposal(seed, round_, exact, of_proposal)
    round_.drafts[-1:, -1:] = size  # outside the vocabulary
    verdict = backend.verify_chain(*arguments, proposal)
    backend.capture_masks(round_.logits, support, verdict, round_.wanted, size)
    backend.verify_chain(*arguments, proposal, threshold_single=0.4, threshold_acc=0.8)


def test_scales_of_a_long_block():
    """More rows than a warp has lanes; a ratio of 0 is known as -1."""
    ratios = np.random.default_rng(38).uniform(0.9, 1.1, 70)

    @cuda.jit
    def scales(ratios, out):
        for i in range(out.shape[0]):
            out[i, cuda.threadIdx.x] = scale_of(ratios, 3, i)

    for zero in (-1.0, ratios[-1]):
        ratios[-1] = zero
        out, want = np.empty((68, 32)), [1.0]
        scales[1, 32](ratios, out)
        for ratio in ratios[3:]:
            want.append(min(1.0, want[-1] * max(ratio, 0.0)))
        assert (out == np.array(want)[:68, None]).all()


@pytest.mark.parametrize(
    ("of_proposal", "order", "skew"), [(None, "top_k_first", 0), (None, "joint", 5), ("float16", "joint", 1)]
)
def test_whole_rounds_are_the_host_twins(of_proposal, order, skew):
    batch, width, size, dtype = 3, 3, 2500, "bfloat16"
    backend = Simulated(skew=skew)
    round_ = make_round(skew, batch, width, size, dtype, num_poisoned=1)
    exact = HOST.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=size)
    proposal = None if of_proposal is None else make_proposal(7, round_, exact, of_proposal)
    arguments = (
        round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, size // 2,
        proposal,
    )  # fmt: skip
    options = {"filter_order": order, "capacity": (size, 50)[skew == 5]}
    for got, want in zip(backend.run_round(*arguments, **options), HOST.run_round(*arguments, **options), strict=True):
        assert_same(got, want)


def test_a_refused_round_spoils_nothing():
    """What is refused has launched nothing, so memory that is used again is as it was."""
    round_ = make_round(5, 1, 2, 500, "float32", num_poisoned=0)
    round_.logits[:] = np.random.default_rng(5).standard_normal(round_.logits.shape)
    for values, value in zip(round_.parameters, (1, 60, 1, 0), strict=True):
        values[:] = value
    arguments = [
        round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, 100
    ]  # fmt: skip
    want = HOST.run_round(*arguments, capacity=100)
    with SIMULATED.patched():
        up = [SIMULATED.to_device(argument) for argument in arguments]
        out = gpu.run_round(*up, capacity=100)
        for place, name in ((6, "num_drafts"), (9, "wanted")):
            refused = list(up)
            refused[place] = refused[place].astype(np.int64)
            with pytest.raises(ValueError, match=f"{name}=int64"):
                gpu.run_round(*refused, capacity=100, out=out)
        for got, expected in zip(gpu.run_round(*up, capacity=100, out=out), want, strict=True):
            assert_same(SIMULATED.to_host(got), expected)


@pytest.mark.parametrize(("dtype", "order"), list(zip(("float32", "bfloat16"), FILTER_ORDERS, strict=True)))
def test_more_candidates_than_fit(dtype, order):
    """No bound, or a bound that too many reach: cutoffs and entries come from the row itself."""
    size, rng = 4500, np.random.default_rng(31)
    x = np.stack([landscape(kind, size, rng) for kind in ("plateau", "flat")])
    parameters = np.ones(2, np.float32), np.array([3, 0], np.int32), np.array([0.5, 0.99], np.float32)
    SIMULATED.select_support(cast(x, dtype), *parameters, filter_order=order, capacity=(size, 64)[dtype == "float32"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_zeros_and_ties_at_the_cutoffs(dtype):
    x = np.full((4, 40), -1, np.float32)
    x[0, ::7], x[0, 1::7] = -0.0, 0.0  # the largest
    x[1, ::3], x[1, 5] = -0.0, 1.0  # the k-th is a zero
    x[2] = -0.0
    x[3, 10:30] = 0.0
    parameters = np.array([0, 1, 1, 0.5], "f4"), np.array([0, 2, 3, 5], "i4"), np.array([1, 1, 0.1, 0.9], "f4")
    support = SIMULATED.select_support(cast(x, dtype), *parameters, capacity=40)
    assert support.count.tolist() == [1, 15, 40, 20]
    assert support.argmax.tolist() == [0, 5, 0, 10]


@pytest.mark.parametrize(
    ("dtype", "order", "size", "whole_rows"),
    [
        ("float32", "top_k_first", 257, False),
        ("bfloat16", "top_k_first", 4500, False),
        ("float32", "joint", 4500, True),
    ],
)
def test_both_zeros_are_one_value(dtype, order, size, whole_rows):
    both_zeros.test_both_zeros_are_one_value(Simulated(whole_rows=whole_rows), dtype, size, order)


def test_bad_parameters_make_their_row_invalid():
    """The host refuses them; the values of device arrays aren't read before the kernel does."""
    x = np.tile(np.arange(9, dtype=np.float32), (9, 1))
    columns = np.array([
        (1, 0, 1, 0), (-1, 0, 1, 0), (np.nan, 0, 1, 0), (np.inf, 0, 1, 0), (1, -1, 1, 0),
        (1, 0, 0, 0), (1, 0, np.nan, 0), (1, 0, 1, 1), (1, 0, 1, -0.5),
    ]).T  # fmt: skip
    parameters = [
        SIMULATED.up(column.astype(kind)) for column, kind in zip(columns, ("f4", "i4", "f4", "f4"), strict=True)
    ]
    with SIMULATED.patched():
        support = SIMULATED.to_host(select_support(SIMULATED.up(x), *parameters, capacity=9))
    assert support.status.tolist() == [0] + [INVALID] * 8
    assert support.count.tolist() == [9] + [0] * 8


def test_room_smaller_than_the_entries():
    """Offsets are true, and what ends within the room is written."""
    round_ = make_round(32, 3, 3, 50, "float32", num_poisoned=0, greedy=0)
    round_.wanted[:] = True
    round_.drafts[:] = round_.logits.argmax(-1)[:, :-1]
    support, verdict, whole = run_round(SIMULATED, round_, "top_k_first", 20, 50)
    total = int(whole.offsets[-1])
    room = int(whole.offsets[whole.offsets.size // 2]) + 1
    assert 1 < room < total
    up = SIMULATED.up
    arguments = (
        round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, 50,
    )  # fmt: skip

    def alone(out):
        capture_masks(up(round_.logits), support.on_device, verdict.on_device, up(round_.wanted), 50, out=out)

    def in_a_round(out):
        gpu.run_round(*map(SIMULATED.to_device, arguments), capacity=20, out=(None, None, out))

    for run in (alone, in_a_round):
        sizes = ((3, "u1"), (3, "i4"), ((3, 3), "i4"), (4, "i8"), (10, "i8"))
        out = Capture(
            *(up(np.zeros(n, kind)) for n, kind in sizes),
            up(np.full(room, -7, np.int32)), up(np.full(room, -7, np.float32)), up(np.zeros(7, np.int64)),
        )  # fmt: skip
        with SIMULATED.patched():
            run(out)
        for name in ("status", "failed_row", "counts", "row_start"):
            np.testing.assert_array_equal(getattr(out, name), getattr(whole, name))
        np.testing.assert_array_equal(out.offsets[: whole.offsets.size], whole.offsets)
        assert (out.offsets[whole.offsets.size :] == total).all()
        written = int(whole.offsets[whole.offsets <= room][-1])
        np.testing.assert_array_equal(out.token_ids[:written], whole.token_ids[:written])
        np.testing.assert_array_equal(out.logprobs[:written], whole.logprobs[:written])
        assert (np.array(out.token_ids[written:]) == -7).all()


def test_an_overflow_and_an_invalid_row_end_their_request_only():
    round_ = make_round(33, 4, 2, 40, "bfloat16", num_poisoned=0, greedy=0)
    temperature, top_k, top_p, min_p = round_.parameters
    temperature[:], top_k[:], top_p[:], min_p[:] = 1, 3, 1, 0
    round_.logits[:] = cast(np.arange(40, dtype=np.float32), "bfloat16")
    round_.logits[1, 1] = 0  # a plateau: 40 ties
    round_.logits[2, 1, 7] = 0x7FC0
    round_.drafts[:], round_.num_drafts[:], round_.coins[0][:], round_.wanted[:] = 39, 1, 0, True
    round_.drafts[1] = 39
    _, verdict, capture = run_round(SIMULATED, round_, "top_k_first", 4, 39)
    assert verdict.num_committed.tolist() == [2, 2, 1, 2]
    assert capture.status.tolist() == [0, OVERFLOW, INVALID, 0]
    assert capture.failed_row.tolist() == [-1, 1, 1, -1]
    assert np.diff(capture.row_start).tolist() == [2, 1, 1, 2]


@pytest.mark.parametrize(("dtype", "size", "capacity"), [("float32", 300, 5), ("bfloat16", 90, 90)])
def test_neither_block_nor_place_changes_a_bit(dtype, size, capacity):
    round_ = make_round(34, 2, 2, size, dtype, num_poisoned=0)
    exact = HOST.select_support(round_.rows, *round_.parameters, capacity=size)
    proposal = make_proposal(34, round_, exact, "float32")
    want = run_round(SIMULATED, round_, "joint", capacity, size, proposal)
    for threads in (32, 128):
        got = run_round(Simulated(threads), round_, "joint", capacity, size, proposal)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    rows = [3, 1]
    parameters = [values[rows] for values in round_.parameters]
    strided = in_gaps(round_.rows[rows], 3, 2)
    some = Simulated(skew=2).select_support(strided, *parameters, filter_order="joint", capacity=capacity)
    assert_same_rows(some, want[0], rows)


def test_memory_is_used_again():
    up = SIMULATED.up
    first, second = (make_round(seed, 2, 2, 90, "float16") for seed in (35, 36))
    with SIMULATED.patched():
        out = select_support(*map(up, (first.rows, *first.parameters)), capacity=8)
        again = select_support(*map(up, (second.rows, *second.parameters)), capacity=8, out=out)
    assert again.token_ids is out.token_ids
    assert_same(SIMULATED.to_host(again), HOST.select_support(second.rows, *second.parameters, capacity=8))


@pytest.mark.parametrize(("dtype", "capacity"), [("float32", 39), ("bfloat16", 1)])
def test_neighbours_in_memory_are_not_of_the_row(dtype, capacity):
    """Larger logits lie on both sides, in the row's first and last granules; so does a NaN, of either sign."""
    wide = np.full((5, 50), 3, np.float32)
    wide[:, 5:44] = landscape("normal", 39, np.random.default_rng(37)) - 3
    wide[2, 5], wide[3, 43], wide[4, 4], wide[4, 44] = -np.nan, -np.nan, -np.nan, np.nan
    x = cast(wide, dtype)[:, 5:44]
    parameters = np.ones(5, "f4"), np.zeros(5, "i4"), np.array([1, 0.9, 1, 1, 1], "f4")
    support = Simulated(skew=3).select_support(x, *parameters, capacity=capacity)
    assert support.status.tolist() == [0, 0, INVALID, INVALID, 0]
    assert support.count[[0, 4]].tolist() == [39, 39]
