"""Rows that many blocks weigh whole, in the simulator: the host twin's bits on every path, and all paths taken."""

from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import gpu
from gpu.capture.device import allocate
from gpu.support import device as support_device
from gpu.support import estimate, pick, settle, whole, window
from gpu.support.cutoffs import mass_limit
from tests.backends import HOST, assert_same
from tests.rounds import make_round
from tests.simulator.backend import Simulated
from tests.strategies import cast, landscape

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # silent where float64 isn't NumPy's


class Paths:
    """What the kernels before the pick have left for every row of every call; small windows while it is entered, and
    unless it settles no row whose mass is only estimated."""

    def __init__(self, few=4, half=20, room=None, settles=False):
        self.few, self.half, self.room, self.settles = few, half, room, settles
        self.sums = []

    def __enter__(self):
        self.stack = ExitStack()
        weigh_rows = support_device.weigh_rows

        def spy(rows, marks, bounds, of_rows, of_whole):
            weigh_rows(rows, marks, bounds, of_rows, of_whole)
            self.sums.append(np.array(of_whole.sums).reshape(-1, whole.SUMS))

        patches = [(support_device, "weigh_rows", spy), (window, "_FEW", self.few), (window, "_HALF", self.half)]
        if not self.settles:
            patches.append((estimate, "MARGIN", 1.0))
        if self.room is not None:
            patches.append((support_device, "room_for", lambda vocabulary: self.room))
        for module, name, value in patches:
            self.stack.enter_context(mock.patch.object(module, name, value))
        return self

    def __exit__(self, *_):
        self.stack.close()

    def column(self, field):
        """One field of all rows."""
        return np.concatenate(self.sums)[:, field]

    def settled(self):
        """Which rows needed no weighing."""
        return (self.column(whole.TOTAL) == whole.SETTLED).tolist()


def of(kinds, size, seed):
    rng = np.random.default_rng(seed)
    return np.stack([landscape(kind, size, rng) for kind in kinds])


@pytest.mark.parametrize(("dtype", "skew", "capacity"), [("bfloat16", 3, 60), ("float16", 9, 1)])
def test_windows_hold_the_crossing(dtype, skew, capacity):
    """Unfiltered, top-p that keeps many or few, min-p beside it."""
    x = of(["normal", "normal", "normal", "holes"], 500, 51) / np.float32(2)
    parameters = (
        np.array([1, 2, 2, 1], np.float32), np.zeros(4, np.int32),
        np.array([1, 0.95, 0.8, 0.7], np.float32), np.array([0, 0, 0.3, 0], np.float32),
    )  # fmt: skip
    with Paths() as paths:
        Simulated(skew=skew, whole_rows=True).select_support(cast(x, dtype), *parameters, capacity=capacity)
    assert (paths.column(whole.TOTAL) > 0).all()
    assert (paths.column(whole.LOW) > 0).tolist() == [False, True, True, True]
    assert (paths.column(whole.NUM_INSIDE)[1:] > 0).all()


@pytest.mark.parametrize(("dtype", "half"), [("bfloat16", 20), ("float32", 0)])
def test_a_window_that_overflows_or_misses_costs_only_time(dtype, half):
    x = of(["normal", "few_values", "plateau", "zeros"], 500, 52)
    parameters = np.repeat(np.float32(3), 4), np.zeros(4, np.int32), np.array([0.9, 0.4, 0.9, 0.9], np.float32)
    with Paths(half=half, room=16) as paths, ExitStack() as stack:
        if half == 0:  # looked for where half as much is kept
            half_as_much = lambda top_p, mass: mass_limit(top_p, mass) / 2  # noqa: E731
            stack.enter_context(mock.patch.object(window, "mass_limit", half_as_much))
        support = Simulated(whole_rows=True).select_support(cast(x, dtype), *parameters, capacity=20)
    windows = paths.column(whole.LOW) > 0
    if half > 0:
        assert (paths.column(whole.NUM_INSIDE)[windows] > 16).sum() >= 2
    else:
        keys = support.cutoff[0].view(np.uint32)  # of a float32: the negative ones' bits, all turned
        keys = ~keys if keys >> 31 else keys | np.uint32(1 << 31)
        assert windows[0]
        assert not paths.column(whole.LOW)[0] <= keys <= paths.column(whole.HIGH)[0]


@pytest.mark.parametrize(
    ("dtype", "order", "skew", "capacity", "settles"),
    [("bfloat16", "top_k_first", 5, 40, True), ("float32", "joint", 0, 500, False)],
)
def test_whole_rounds_are_the_host_twins(dtype, order, skew, capacity, settles):
    """Rows of every kind side by side: with top-k and without, greedy, invalid; twice into the same memory."""
    batch, width, size = 2, 3, 500
    round_ = make_round(60 + skew, batch, width, size, dtype, num_poisoned=1)
    round_.parameters[1][::2] = 0
    arguments = (
        round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, size,
    )  # fmt: skip
    options = {"filter_order": order, "capacity": capacity}
    with Paths(settles=settles) as paths:
        results = Simulated(skew=skew, whole_rows=True).run_round(*arguments, **options)
    for got, want in zip(results, HOST.run_round(*arguments, **options), strict=True):
        assert_same(got, want)
    np.testing.assert_array_equal(*paths.sums)
    weighed = paths.column(whole.TOTAL) > 0
    assert weighed.any()
    assert not weighed.all()
    assert any(paths.settled())


def peaked(size, seed, tail=0.02):
    """float32 [size]: a few dozen likely logits, and what the others weigh together."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * 2.5
    likely = rng.choice(size, 24, replace=False)
    head = 20 - rng.exponential(1.5, likely.size)
    x -= np.log(np.exp(x).sum() / np.exp(head).sum() * (1 - tail) / tail)
    x[likely] = head
    return x.astype(np.float32)


SIDE_BY_SIDE = (  # kind of row, temperature, top_k, top_p, min_p, whether it is settled in either order
    ("peaked", 1, 0, 0.95, 0, True, True),
    ("peaked", 0.5, 0, 0.9, 0.2, True, True),
    ("peaked", 1, 0, 1, 0.01, True, True),  # min-p asks for no mass
    ("peaked", 1, 5, 0.97, 0, True, True),
    ("peaked", 0, 0, 0.5, 0, True, True),  # greedy
    ("peaked", 1, 0, 1, 0, False, False),  # all is kept
    ("normal", 3, 0, 0.95, 0, False, False),  # more than is looked at
    ("normal", 3, 0, 1, 1e-9, False, False),
    ("normal", 3, 8, 0.97, 0, True, True),
    ("halves", 1, 0, 0.5, 0, False, False),  # the crossing is where the mass ends, to the last bit
    ("halves", 1, 0, 0.6, 0, True, True),
    ("halves", 1, 1000, 0.5, 0, False, False),  # no more tokens than that
    ("halves", 1, 3, 0.875, 0, True, True),  # top-k cuts it there too
    ("halves", 1, 4, 0.875, 0, True, False),
    ("steep", 1e-4, 0, 0.95, 0, True, True),
    ("zeros", 1, 0, 0.95, 0, True, True),  # ties, of both zeros
    ("peaked", 2e30, 0, 0.95, 0, False, False),  # too hot for an estimate
    ("empty", 1, 0, 0.95, 0, False, False),
)


@pytest.mark.parametrize(
    ("dtype", "order", "skew", "few"), [("bfloat16", "top_k_first", 3, 32), ("float32", "joint", 0, 4)]
)
def test_rows_are_settled_if_their_support_is_certain_and_small(dtype, order, skew, few):
    """Among as many of their largest as are looked at; with `few`, most supports are found at the second look only."""
    size = 600
    kinds, *columns, first, joint = zip(*SIDE_BY_SIDE, strict=True)
    made = {"peaked": lambda i: peaked(size, i), "empty": lambda i: np.full(size, -np.inf, np.float32)}
    rng = np.random.default_rng(55)
    x = np.stack([made[k](i) if k in made else landscape(k, size, rng) for i, k in enumerate(kinds)])
    types = np.float32, np.int32, np.float32, np.float32
    parameters = [np.array(values, kind) for values, kind in zip(columns, types, strict=True)]
    with Paths(settles=True) as paths, mock.patch.object(pick, "_GUESS", 32), mock.patch.object(settle, "_FEW", few):
        Simulated(skew=skew, whole_rows=True).select_support(
            cast(x, dtype), *parameters, filter_order=order, capacity=size
        )
    want = joint if order == "joint" else first
    if dtype == "bfloat16":  # whose halves are none
        want = [one or kind == "halves" for one, kind in zip(want, kinds, strict=True)]
    assert list(zip(SIDE_BY_SIDE, paths.settled(), strict=True)) == list(zip(SIDE_BY_SIDE, want, strict=True))


def test_neither_block_nor_place_changes_a_bit():
    x = cast(of(["normal", "steps"], 600, 53), "bfloat16")
    parameters = np.ones(2, np.float32), np.zeros(2, np.int32), np.array([0.9, 0.8], np.float32)
    with Paths():
        for threads, skew in ((32, 7), (128, 1)):  # held against the host each time
            Simulated(threads, skew, whole_rows=True).select_support(x, *parameters, capacity=90)


@pytest.mark.parametrize(("dtype", "size", "skew", "room"), [("float32", 1100, 3, 2000), ("bfloat16", 1100, 9, 1100)])
def test_masks_without_entries_are_written_by_many_blocks(dtype, size, skew, room):
    """Over two and three chunks a row, beside a row with entries; and again with the last row beyond the room."""
    x = of(["normal", "steps", "holes"], size, 54)[None]
    parameters = (
        np.array([1, 1, 2], np.float32), np.array([0, 20, 0], np.int32), np.array([1, 1, 0.9], np.float32),
        np.zeros(3, np.float32),
    )  # fmt: skip
    drafts, coins = x.argmax(-1)[:, :-1].astype(np.int32), (np.zeros((1, 3)), np.full((1, 3), 0.5))
    arguments = cast(x, dtype), *parameters, drafts, np.full(1, 2, np.int32), *coins, np.ones(1, np.bool_), size
    backend = Simulated(32, skew, whole_rows=True)
    support, _, want = backend.run_round(*arguments, capacity=50)
    for got, expected in zip((support, want), HOST.run_round(*arguments, capacity=50)[::2], strict=True):
        assert_same(got, expected)
    assert (support.count > 50).tolist() == [True, False, True]
    assert (want.offsets[-1] > room) == (dtype == "bfloat16")
    out = allocate(1, 3, room)
    out.token_ids[:] = -7
    with backend.patched():
        up = map(backend.to_device, arguments)
        gpu.run_round(*up, capacity=50, whole_rows=True, out=(None, None, out))
    written = int(want.offsets[want.offsets <= room][-1])
    np.testing.assert_array_equal(out.token_ids[:written], want.token_ids[:written])
    np.testing.assert_array_equal(out.logprobs[:written], want.logprobs[:written])
    assert (out.token_ids[written:] == -7).all()
