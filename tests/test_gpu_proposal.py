"""draw_drafts against the oracle, and verification by the laws that it leaves against the same laws written out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu
from gpu import FILTER_ORDERS
from tests import device_graph, naive
from tests.backends import DEVICE, DRAWN_FIELDS, HOST, assert_same, same_bits
from tests.cases import keeps_failures
from tests.laws import PLACES, Drafting, dense_by_hand, law_of, make_drafting, tokens_of
from tests.rounds import make_round, run_round
from tests.strategies import DTYPES, fuzz, row_batches, unit


@keeps_failures
def check_draws(backend, rows, uniforms, order):
    drafting = Drafting(rows.logits[:, None], rows.filter_arguments()[1:], np.array(uniforms)[:, None])
    drawn = backend.draw_drafts(drafting.logits, drafting.parameters, drafting.uniforms, filter_order=order)
    laws = gpu.dense_law(gpu.LogitsLaw.of(drafting.logits, drawn))
    for row, (x, *parameters) in enumerate(zip(*rows.filter_arguments(), strict=True)):
        policy = naive.policy(naive.decode(x), *map(float, parameters), filter_order=order)
        law, entry = laws[row, 0].astype(np.float64), drawn.index[row, 0]
        if not policy.valid:
            chosen = parameters[0] < np.float32(1e-5) or parameters[1] == 1
            assert entry == 0
            assert law[0] == 1 if chosen else np.isnan(law).all()
        elif not policy.borderline:
            assert np.abs(law - policy.probs).sum() < 4e-6
            assert ((law > 0) <= policy.kept).all()
            token, close = naive.draw(policy.probs, uniforms[row])
            assert entry == token or (close and not policy.greedy)
        if policy.valid:
            assert law[entry] > 0


@fuzz
@given(data=st.data(), order=st.sampled_from(FILTER_ORDERS))
def test_draws_are_the_oracles(backend, data, order):
    rows = data.draw(row_batches())
    uniforms = data.draw(st.lists(unit, min_size=len(rows.logits), max_size=len(rows.logits)))
    check_draws(backend, rows=rows, uniforms=uniforms, order=order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 700, 5000])
def test_all_at_once_or_one_after_another(backend, size, dtype):
    drafting = make_drafting(size, 5, 4, size, dtype)
    arguments = drafting.logits, drafting.parameters, drafting.uniforms
    for order in FILTER_ORDERS:
        at_once = backend.draw_drafts(*arguments, filter_order=order)
        in_turn = backend.draw_drafts(*arguments, in_turn=True, filter_order=order)
        for name in DRAWN_FIELDS:
            assert same_bits(getattr(at_once, name), getattr(in_turn, name)).all(), name


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", PLACES)
def test_verification_reads_the_law_that_was_drawn_from(backend, places, dtype, order):
    """Bit for bit what it makes of the same law as probabilities, which are those of the filter's own weights."""
    for seed, (batch, width, size, capacity) in enumerate([(6, 4, 300, 300), (2, 8, 33, 5), (3, 2, 2, 1)]):
        num_entries = size if places == "by token" else max(1, size // 2)
        drafting = make_drafting(seed, batch, width - 1, num_entries, dtype, num_poisoned=1 + seed)
        drawn = backend.draw_drafts(drafting.logits, drafting.parameters, drafting.uniforms, filter_order=order)
        law = law_of(drafting, drawn, places, size)
        dense = gpu.dense_law(law)
        assert same_bits(dense, dense_by_hand(drafting, law, order)).all()
        round_ = make_round(seed, batch, width, size, "float32", num_poisoned=0)
        tokens = np.take_along_axis(tokens_of(law), drawn.index[..., None], -1)[..., 0]
        round_ = replace(round_, drafts=tokens.astype(np.int32))
        near = np.maximum(np.nan_to_num(dense), 1e-9)
        round_.logits[:, :-1] = np.log(near) + np.clip(round_.logits[:, :-1], -1, 1)  # often kept, often not
        records = run_round(backend, round_, order, capacity, size, law)
        for got, want in zip(records, run_round(backend, round_, order, capacity, size, dense), strict=True):
            assert_same(got, want)


def test_a_sampled_draft_without_a_law_ends_its_request_only(backend):
    """NaN among the draft's logits: greedy neighbours, and those whose logits are good, go on."""
    logits = np.zeros((4, 1, 5), np.float32)
    logits[:3, 0, 2] = np.nan
    policy = np.array([1, 0, 1, 1], "f4"), np.array([0, 0, 1, 0], "i4"), np.ones(4, "f4"), np.zeros(4, "f4")
    drawn = backend.draw_drafts(logits, policy, np.full((4, 1), 0.5))
    assert drawn.index[:, 0].tolist() == [0, 0, 0, 2]
    law = gpu.LogitsLaw.of(logits, drawn)
    x = np.zeros((4, 2, 5), np.float32)
    support = backend.select_support(x.reshape(8, 5), *(values.repeat(2) for values in policy[:3]), capacity=5)
    coins = np.full((4, 2), 0.9), np.full((4, 2), 0.5)
    verdict = backend.verify_chain(x, support, drawn.index.astype(np.int32), np.ones(4, np.int32), *coins, law)
    assert verdict.status.tolist() == [gpu.INVALID, gpu.OK, gpu.OK, gpu.OK]
    assert verdict.num_accepted.tolist() == [0, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "width", "size"), [(32, 8, 151936), (8, 5, 248320)])
def test_full_batches_are_the_host_twins(batch, width, size, dtype):
    drafting = make_drafting(batch, batch, width - 1, size, dtype, num_poisoned=3)
    for in_turn in (False, True):
        drawn = DEVICE.draw_drafts(drafting.logits, drafting.parameters, drafting.uniforms, in_turn=in_turn)
    round_ = replace(make_round(batch, batch, width, size, "bfloat16"), drafts=drawn.index.astype(np.int32))
    run_round(DEVICE, round_, "top_k_first", 1024, 4096, gpu.LogitsLaw.of(drafting.logits, drawn))


@pytest.mark.gpu
@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_graph_draws_from_new_logits(whole_rows):
    old, new = (make_drafting(seed, 4, 3, 32001, "bfloat16") for seed in (7, 8))
    logits, coins, index = DEVICE.up(old.logits), DEVICE.up(old.uniforms), DEVICE.up(np.zeros((4, 3), np.int64))
    policy, memory = [DEVICE.up(values) for values in old.parameters], {}

    def draw():
        memory["drawn"] = gpu.draw_drafts(logits, *policy, coins, index, whole_rows=whole_rows, out=memory.get("drawn"))

    def change():
        for own, values in zip([logits, coins, *policy], [new.logits, new.uniforms, *new.parameters], strict=True):
            own.set(values)

    device_graph.replay(draw, change)
    want = HOST.draw_drafts(new.logits, new.parameters, new.uniforms)
    for name in DRAWN_FIELDS:
        assert same_bits(DEVICE.down(getattr(memory["drawn"], name)), getattr(want, name)).all(), name


F, I = np.float32, np.int32


def arguments(**changes):
    policy = {"temperature": np.ones(4, F), "top_k": np.zeros(4, I), "top_p": np.ones(4, F), "min_p": np.zeros(4, F)}
    base = {"logits": np.zeros((2, 2, 6), F), "uniforms": np.zeros((2, 3)), "index": np.zeros((2, 3), np.int64)}
    return base | policy | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.zeros((2, 6), F)}, r"logits=\(2, 6\), expected \[B, w, n\]"),
        ({"first": 2}, r"first=2, expected 2 drafts from there among 3"),
        ({"first": -1}, r"first=-1, expected 2 drafts"),
        ({"filter_order": "both"}, r"filter_order='both', expected one of"),
        ({"uniforms": np.ones((2, 3))}, r"uniforms\[0, 0\]=1.0, expected a uniform in \[0, 1\)"),
        ({"uniforms": np.zeros((2, 2))}, r"uniforms=float64\[2, 2\], expected a NumPy array float64\[2, 3\]"),
        ({"index": np.zeros((2, 3), I)}, r"index=int32\[2, 3\], expected a NumPy array int64\[2, D\]"),
        ({"top_p": np.zeros(4, F)}, r"top_p\[0\]=0.0, expected a number in \(0, 1\]"),
        ({"temperature": np.ones(2, F)}, r"temperature=float32\[2\], expected a NumPy array float32\[4\]"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        gpu.draw_drafts(**arguments(**changes))


def test_out_of_other_shapes():
    drawn = gpu.draw_drafts(**arguments())
    with pytest.raises(ValueError, match=r"out=\(2, 3\), expected a Drawn of an earlier call"):
        gpu.draw_drafts(**arguments(index=np.zeros((2, 4), np.int64), uniforms=np.zeros((2, 4))), out=drawn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 7}, r"draft_probs=\(2, 2, 7\), expected shape \(2, 2, 6\)"),
        ({"share": np.zeros((2, 2), F)}, r"draft_probs.share=float32\[2, 2\], expected a NumPy array float64\[2, 2\]"),
        ({"entry_of": np.zeros(5, I)}, r"draft_probs.entry_of=int32\[5\], expected a NumPy array int32\[6\]"),
        ({"token_ids": np.zeros((2, 2, 6))}, r"draft_probs.token_ids=float64\[2, 2, 6\], expected .* int32\[2, 2, 6\]"),
        ({"logits": np.zeros((2, 2, 6))}, r"draft_probs.logits.dtype=float64, expected float32, float16"),
    ],
)
def test_laws_that_do_not_fit(changes, message):
    drafting = make_drafting(1, 2, 2, 6, "float32", num_poisoned=0)
    drawn = gpu.draw_drafts(drafting.logits, *drafting.parameters, drafting.uniforms, np.zeros((2, 2), np.int64))
    law = replace(gpu.LogitsLaw.of(drafting.logits, drawn), **changes)
    round_ = make_round(1, 2, 3, 6, "float32", num_poisoned=0)
    support = gpu.select_support(round_.rows, *round_.parameters, capacity=6)
    with pytest.raises(ValueError, match=message):
        gpu.verify_chain(round_.logits, support, round_.drafts, round_.num_drafts, *round_.coins, law)
