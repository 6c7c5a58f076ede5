"""Every layout round-trips a pipeline's own rollouts, and refuses what is wrong by its row."""

import dataclasses
import functools
import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidRequest, Rollouts, SamplingMask, SamplingParams, TopLogprobs, exports
from pipeline.results.rollouts import METADATA_KEY, SCHEMA
from tests import pipes
from tests.strategies import fuzz
from tests.test_rollouts import same


@functools.cache
def rollouts(mode="selected"):
    """Five rollouts of the tiny pair, one of them greedy: supports of many sizes."""
    params = SamplingParams(
        temperature=0.9, top_k=30, top_p=0.9, max_new_tokens=8, seed=4, ignore_eos=True, n=2,
        return_sampling_mask=True, sampling_logprobs=mode, top_logprobs=6,
    )  # fmt: skip
    each = [params, dataclasses.replace(params, top_k=3), dataclasses.replace(params, temperature=0, n=1)]
    return pipes.pipe().generate([[1, 2, 3], [40, 41], [7, 8, 9, 10]], each)


def as_json(layout):
    return json.loads(json.dumps(layout))


def selected(rollout):
    """What a layout without log-probabilities of supports can give back."""
    mask = rollout.sampling_mask
    return SamplingMask(mask.token_ids, mask.offsets, rollout.logprobs, "selected")


LAYOUTS = {
    "vllm": lambda r: exports.from_vllm(exports.to_vllm(r), r.token_ids, r.logprobs),
    "vllm lists": lambda r: exports.from_vllm_lists(as_json(exports.to_vllm_lists(r)), r.token_ids, r.logprobs),
    "miles": lambda r: exports.from_miles(exports.to_miles(r), r.token_ids, r.logprobs),
    "prime-rl": lambda r: exports.from_prime_rl(exports.to_prime_rl(r), r.token_ids, r.logprobs)[0],
    "skyrl": lambda r: exports.from_skyrl(exports.to_skyrl(r, 40), r.token_ids, r.logprobs),
    "sglang": lambda r: exports.from_sglang(as_json(exports.to_sglang(r)), r.token_ids),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["selected", "support"])
def test_round_trip(layout, mode):
    for rollout in rollouts(mode):
        back = LAYOUTS[layout](rollout)
        assert same(back, rollout.sampling_mask if layout == "sglang" else selected(rollout))


def test_what_the_layouts_hold():
    """Dtypes, names and shapes, as the systems read them."""
    rollout = rollouts("support")[0]
    mask, n = rollout.sampling_mask, len(rollout.token_ids)
    csr = exports.to_vllm(rollout)
    assert (csr["token_ids"].dtype, csr["offsets"].dtype, csr["offsets"][-1]) == (
        np.int32,
        np.int64,
        len(mask.token_ids),
    )
    meta_info = exports.to_sglang(rollout)
    assert sorted(meta_info) == [
        "output_token_sampling_logprobs", "output_token_sampling_mask", "output_token_sampling_mask_length",
    ]  # fmt: skip
    assert meta_info["output_token_sampling_mask_length"] == n
    assert list(map(len, meta_info["output_token_sampling_logprobs"])) == mask.sizes.tolist()
    assert exports.to_sglang(rollouts()[0])["output_token_sampling_logprobs"] == rollouts()[0].logprobs.tolist()
    flat = exports.to_miles(rollout)
    assert flat["rollout_sampling_mask_ids"].dtype == np.int32
    assert flat["rollout_sampling_mask_offsets"].shape == (n + 1,)
    kept = exports.to_prime_rl(rollout, with_prompt=True)
    assert kept["ids"].dtype == kept["counts"].dtype == np.int32
    assert kept["counts"].tolist() == [0] * 3 + mask.sizes.tolist()
    dense = exports.to_skyrl(rollout, 33)
    assert (dense.dtype, dense.shape) == (np.int32, (n, 33))
    assert (dense == -1).sum() == n * 33 - len(mask.token_ids)


def test_miles_top():
    for rollout in rollouts("support"):
        layout = exports.to_miles_top(rollout, 40)
        ids, values = layout["rollout_topk_token_ids"], layout["rollout_topk_log_probs"]
        assert (ids.dtype, values.dtype, ids.shape) == (np.int32, np.float32, (8, 40))
        assert (values[:, 1:] <= values[:, :-1]).all()
        back = exports.from_miles_top(layout)
        for i, row in enumerate(rollout.sampling_mask):
            order = np.argsort(back.ids[i, : len(row)])
            assert back.ids[i][order].tolist() == row.tolist()
            assert back.values[i][order].tolist() == rollout.sampling_mask.row_logprobs(i).tolist()
        narrow = exports.to_miles_top(rollout)["rollout_topk_token_ids"]
        assert narrow.shape == (8, rollout.sampling_mask.sizes.max())
        top = exports.from_miles_top(exports.to_miles_top(dataclasses.replace(rollout, sampling_mask=None)))
        assert same(top, rollout.top_logprobs)
        # The most probable of the support are the recorded top K.
        k = min(6, narrow.shape[1])
        assert narrow[:, :k].tolist() == top.ids[:, :k].tolist()


def test_prime_rl_without_replay():
    rollout = dataclasses.replace(rollouts()[0], sampling_mask=None)
    mask, replayed = exports.from_prime_rl(exports.to_prime_rl(rollout), rollout.token_ids, rollout.logprobs)
    assert len(mask) == 0
    assert not replayed.any()
    whole = rollouts()[0]
    sequence = np.concatenate([whole.prompt_token_ids, whole.token_ids])
    logprobs = np.concatenate([np.zeros(3, np.float32), whole.logprobs])
    mask, replayed = exports.from_prime_rl(exports.to_prime_rl(whole, with_prompt=True), sequence, logprobs)
    assert same(mask, selected(whole))
    assert replayed.tolist() == [False] * 3 + [True] * 8


def test_rows_in_another_order_are_sorted_with_their_log_probabilities():
    rollout = rollouts("support")[0]
    meta_info = exports.to_sglang(rollout)
    for name in ("output_token_sampling_mask", "output_token_sampling_logprobs"):
        meta_info[name] = [row[::-1] for row in meta_info[name]]
    assert same(exports.from_sglang(meta_info, rollout.token_ids), rollout.sampling_mask)
    dense = exports.to_skyrl(rollout, 40)[:, ::-1]
    assert same(exports.from_skyrl(dense, rollout.token_ids, rollout.logprobs), selected(rollout))


class TestDatasets:
    def check(self, back, expected):
        assert isinstance(back, Rollouts)
        assert back.provenance == rollouts("support").provenance
        assert len(back) == len(expected)
        assert all(same(a, b) for a, b in zip(back, expected, strict=True))

    def test_round_trip(self):
        for mode in ("selected", "support"):
            dataset = exports.to_dataset(rollouts(mode))
            assert dataset.column_names == SCHEMA.names
            assert dataset[0]["text"] == rollouts(mode)[0].text
            back = exports.from_dataset(dataset)
            assert all(same(a, b) for a, b in zip(back, rollouts(mode), strict=True))

    def test_after_selecting_shuffling_and_saving(self, tmp_path):
        own = rollouts("support")
        dataset = exports.to_dataset(own)
        order = dataset.shuffle(seed=3)["prompt_index"]
        shuffled = exports.from_dataset(dataset.shuffle(seed=3))
        assert [r.prompt_index for r in shuffled] == list(order)
        self.check(exports.from_dataset(dataset.select([4, 0])), [own[4], own[0]])
        dataset.save_to_disk(tmp_path / "rollouts")
        self.check(exports.from_dataset(datasets.load_from_disk(tmp_path / "rollouts")), own)

    def test_refused_rollouts_keep_their_reason(self):
        own = Rollouts([*rollouts("support"), *rollouts()[0].refused("top_k=None, expected", 3, 2, 1)], {"a": 1})
        back = exports.from_dataset(exports.to_dataset(own))
        assert [r.error for r in back.failed] == ["top_k=None, expected"] * 2
        assert back.provenance == {"a": 1}

    def test_another_dataset(self):
        with pytest.raises(InvalidRequest, match="description='', expected what to_dataset wrote"):
            exports.from_dataset(datasets.Dataset.from_dict({"a": [1]}))


class TestArrow:
    def table(self, **changes):
        table = rollouts("support").to_arrow()
        for name, change in changes.items():
            rows = table[name].to_pylist()
            rows[2] = change(rows[2])
            index = table.schema.get_field_index(name)
            table = table.set_column(index, table.schema.field(name), pa.array(rows, table.schema.field(name).type))
        return table

    def test_round_trip(self):
        back = Rollouts.from_arrow(self.table())
        assert all(same(a, b) for a, b in zip(back, rollouts("support"), strict=True))
        shuffled = self.table().select(SCHEMA.names[::-1]).append_column("mine", pa.array([1] * 5))
        assert same(Rollouts.from_arrow(shuffled)[3], rollouts("support")[3])

    @pytest.mark.parametrize(
        ("name", "change", "match"),
        [
            ("logprobs", lambda x: x[1:], "row 2: logprobs=7, expected 8: one a token"),
            ("mask_offsets", lambda x: x[:-1], r"row 2: mask.offsets\[7\]=\d+, expected the number of entries"),
            ("mask_offsets", lambda x: [*x[:3], x[2] - 1, *x[4:]], r"row 2: mask.offsets\[3\]=.*, expected at least"),
            ("mask_logprobs", lambda x: x[1:], r"row 2: mask.logprobs=float32\[\d+\], expected a NumPy array"),
            ("mask_token_ids", lambda x: x[1:], r"row 2: mask.offsets\[8\]=\d+, expected the number of entries"),
            ("top_ids", lambda x: x[1:], "row 2: top_ids=47, expected 8 x 6"),
            ("top_values", lambda x: None, "row 2: top_values=None, expected 8 x 6"),
            ("mask_mode", lambda x: "all", "row 2: mask.mode='all', expected"),
        ],
    )
    def test_rows_that_do_not_line_up(self, name, change, match):
        with pytest.raises(ValueError, match=match):
            Rollouts.from_arrow(self.table(**{name: change}))

    def test_a_mask_of_fewer_rows(self):
        mask = rollouts("support")[2].sampling_mask
        entries = mask.offsets[-2]
        changes = {"mask_offsets": lambda x: x[:-1]}
        changes |= dict.fromkeys(("mask_token_ids", "mask_logprobs"), lambda x: x[:entries])
        with pytest.raises(ValueError, match="row 2: mask rows=7, expected 8: one for every token"):
            Rollouts.from_arrow(self.table(**changes))

    def test_a_missing_column_and_another_format(self):
        with pytest.raises(ValueError, match=r"columns \['seed'\] of the table: missing"):
            Rollouts.from_arrow(self.table().drop_columns(["seed"]))
        with pytest.raises(ValueError, match="format='v9' in the table, expected"):
            Rollouts.from_arrow(self.table().replace_schema_metadata({METADATA_KEY: b'{"format": "v9"}'}))

    def test_the_docstring_names_every_column(self):
        """The schema is documented where it is defined: a column by its name, or by its family ("audit_*")."""
        source = (Path(__file__).parent.parent / "pipeline" / "results" / "rollouts.py").read_text()
        documented = source.split("class Rollouts(")[0].split('"""')[-2]
        for name in SCHEMA.names:
            assert name in documented or f"{name.split('_')[0]}_*" in documented, name


class TestRefusedReading:
    """One corrupted response, read through every layout."""

    def layout(self):
        rollout = rollouts("support")[0]
        return rollout, [row.tolist() for row in rollout.sampling_mask]

    @pytest.mark.parametrize(
        ("corrupt", "match"),
        [
            (lambda rows, token: rows.__setitem__(3, []), r"sampling_mask\[3\]=\[\], expected at least one token"),
            (
                lambda rows, token: rows[5].append(320),
                r"sampling_mask\[5\] has token id=320, expected .*vocabulary, 320",
            ),
            (lambda rows, token: rows[5].append(-5), r"sampling_mask\[5\] has token id=-5, expected"),
            (
                lambda rows, token: rows[2].append(rows[2][0]),
                r"sampling_mask\[2\] has token ids=(\d+), \1 side by side",
            ),
            (
                lambda rows, token: rows[4].remove(token(4)),
                r"token_ids\[4\]=\d+, expected one of the \d+ tokens of mask\[4\]",
            ),
            (lambda rows, token: rows.pop(), "logprobs=float32.8., expected 7 numbers"),
            (lambda rows, token: rows.__setitem__(6, [1.5]), r"sampling_mask\[6\]=float64\[1\], expected .*integers"),
            (lambda rows, token: rows.__setitem__(6, "7"), r"sampling_mask\[6\]='7', expected a list"),
            (lambda rows, token: rows[6].append(2**40), r"sampling_mask\[6\]\[\d+\]=1099511627776, expected an int32"),
        ],
    )
    def test_lists(self, corrupt, match):
        rollout, rows = self.layout()
        corrupt(rows, lambda i: int(rollout.token_ids[i]))
        with pytest.raises(InvalidRequest, match=match):
            exports.from_vllm_lists(rows, rollout.token_ids, rollout.logprobs, vocab_size=320)

    def test_csr(self):
        rollout, _ = self.layout()
        for read, names, write in (
            (exports.from_vllm, ("token_ids", "offsets"), exports.to_vllm),
            (exports.from_miles, ("rollout_sampling_mask_ids", "rollout_sampling_mask_offsets"), exports.to_miles),
        ):
            good = write(rollout)
            offsets = good[names[1]].copy()
            offsets[3] = offsets[2]
            with pytest.raises(InvalidRequest, match=r"mask\[2\]=\[\], expected at least one token"):
                read({**good, names[1]: offsets}, rollout.token_ids, rollout.logprobs)
            with pytest.raises(InvalidRequest, match=r"mask.offsets\[8\]=\d+, expected the number of entries"):
                read({**good, names[0]: good[names[0]][1:]}, rollout.token_ids, rollout.logprobs)
            with pytest.raises(InvalidRequest, match=f"{names[0]}=None, expected it in the layout"):
                read({names[1]: good[names[1]]}, rollout.token_ids, rollout.logprobs)
            with pytest.raises(InvalidRequest, match="mask rows=8, expected 7"):
                read(good, rollout.token_ids[1:], rollout.logprobs)

    def test_sglang(self):
        rollout, _ = self.layout()
        good = exports.to_sglang(rollout)

        def refuse(match, **changes):
            with pytest.raises(InvalidRequest, match=match):
                exports.from_sglang(good | changes, rollout.token_ids)

        logprobs = good["output_token_sampling_logprobs"]
        refuse("mask_length=9, expected 8, the rows", output_token_sampling_mask_length=9)
        refuse(r"logprobs\[0\]: another length", output_token_sampling_logprobs=[logprobs[0][1:], *logprobs[1:]])
        refuse(r"logprobs\[7\]: another length", output_token_sampling_logprobs=logprobs[:-1])
        refuse(
            r"output_token_sampling_mask\[1\] sums to .*, expected 1 within",
            output_token_sampling_logprobs=[logprobs[0], [x - 0.01 for x in logprobs[1]], *logprobs[2:]],
        )
        refuse("output_token_sampling_logprobs=None, expected it", output_token_sampling_logprobs=None)
        refuse("output_token_sampling_mask=str, expected a list of lists", output_token_sampling_mask="1")

    def test_prime_rl(self):
        rollout, _ = self.layout()
        good = exports.to_prime_rl(rollout)
        counts = good["counts"].copy()
        counts[5] -= 1
        for layout, match in (
            ({**good, "counts": counts}, r"mask.offsets\[8\]=\d+, expected the number of entries"),
            ({**good, "counts": good["counts"] * -1}, r"counts\[0\]=-\d+, expected at least 0"),
            ({**good, "counts": good["counts"][1:]}, "counts: 7, expected 8: one a token"),
        ):
            with pytest.raises(InvalidRequest, match=match):
                exports.from_prime_rl(layout, rollout.token_ids, rollout.logprobs)

    def test_skyrl(self):
        rollout, _ = self.layout()
        dense = exports.to_skyrl(rollout, 40)
        dense[6] = -1
        with pytest.raises(InvalidRequest, match=r"sampling_mask\[6\]=\[\], expected at least one token"):
            exports.from_skyrl(dense, rollout.token_ids, rollout.logprobs)
        with pytest.raises(InvalidRequest, match=r"sampling_mask=int32\[320\], expected integers \[tokens, top_k\]"):
            exports.from_skyrl(dense.ravel(), rollout.token_ids, rollout.logprobs)

    def test_miles_top(self):
        rollout, _ = self.layout()
        good = exports.to_miles_top(rollout, 40)
        values = good["rollout_topk_log_probs"].copy()
        values[3, -1] = -1.0
        with pytest.raises(InvalidRequest, match=r"rollout_topk\[3\]: ids=.*only -1 with -inf behind the last"):
            exports.from_miles_top(good | {"rollout_topk_log_probs": values})
        with pytest.raises(
            InvalidRequest, match=r"rollout_topk: ids int32\[8, 40\], log-probabilities float32\[8, 39\]"
        ):
            exports.from_miles_top(good | {"rollout_topk_log_probs": values[:, 1:]})
        ids = good["rollout_topk_token_ids"].copy()
        row = int((ids[:, 1] >= 0).argmax())
        ids[row, 1] = ids[row, 0]
        with pytest.raises(InvalidRequest, match=rf"rollout_topk\[{row}\] has a token id twice"):
            exports.from_miles_top(good | {"rollout_topk_token_ids": ids})


def test_refused_writing():
    rollout = rollouts("support")[0]
    row, size = int(rollout.sampling_mask.sizes.argmax()), int(rollout.sampling_mask.sizes.max())
    with pytest.raises(InvalidRequest, match=rf"mask\[{row}\]\.size={size}, expected at most k={size - 1}"):
        exports.to_miles_top(rollout, size - 1)
    with pytest.raises(InvalidRequest, match=rf"mask\[{row}\]\.size={size}, expected at most top_k={size - 1}"):
        exports.to_skyrl(rollout, size - 1)
    bare = dataclasses.replace(rollout, sampling_mask=None, top_logprobs=None)
    with pytest.raises(InvalidRequest, match="top_logprobs=None, expected them or a mask"):
        exports.to_miles_top(bare)
    with pytest.raises(InvalidRequest, match="k=7, expected the recorded K, 6"):
        exports.to_miles_top(dataclasses.replace(rollout, sampling_mask=None), 7)
    for write in (exports.to_vllm, exports.to_vllm_lists, exports.to_sglang, exports.to_miles):
        with pytest.raises(InvalidRequest, match="sampling_mask=None, expected one"):
            write(bare)
    cut = dataclasses.replace(rollout, token_ids=rollout.token_ids[1:])
    failed = dataclasses.replace(rollout, error="INVALID: ...")
    for write in (exports.to_vllm, exports.to_vllm_lists, exports.to_sglang, exports.to_miles, exports.to_prime_rl):
        with pytest.raises(InvalidRequest, match="mask rows=8, expected 7"):
            write(cut)
        with pytest.raises(InvalidRequest, match=r"rollout.error='INVALID: ...', expected a finished"):
            write(failed)


def test_top_logprobs_of_another_kind():
    top = TopLogprobs(np.array([[1.0]]), np.array([[0.0]]))
    with pytest.raises(InvalidRequest, match=r"rollout_topk: ids float64\[1, 1\]"):
        exports.from_miles_top({"rollout_topk_token_ids": top.ids, "rollout_topk_log_probs": top.values})


@st.composite
def any_rollouts(draw):
    """A rollout with supports of any sizes and ids, whose probabilities sum to one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    ids = [np.sort(rng.choice(draw(st.sampled_from([40, 41, 2**31 - 1])), size, replace=False)) for size in sizes]
    logits = [rng.normal(scale=draw(st.sampled_from([0.0, 1.0, 30.0])), size=size) for size in sizes]
    logprobs = [(x - x.max() - np.log(np.exp(x - x.max()).sum())).astype(np.float32) for x in logits]
    taken = [rng.integers(size) for size in sizes]
    mask = SamplingMask(
        np.concatenate(ids).astype(np.int32), np.cumsum([0, *sizes]), np.concatenate(logprobs), "support"
    )
    token_ids = np.array([row[i] for row, i in zip(ids, taken, strict=True)], np.int32)
    selected = np.array([row[i] for row, i in zip(logprobs, taken, strict=True)], np.float32)
    return dataclasses.replace(rollouts("support")[0], token_ids=token_ids, logprobs=selected, sampling_mask=mask)


@fuzz
@given(any_rollouts())
def test_any_mask_round_trips(rollout):
    for name, layout in LAYOUTS.items():
        assert same(layout(rollout), rollout.sampling_mask if name == "sglang" else selected(rollout))
    top = exports.from_miles_top(exports.to_miles_top(rollout))
    for i, row in enumerate(rollout.sampling_mask):
        order = np.argsort(top.ids[i, : len(row)])
        assert top.ids[i][order].tolist() == row.tolist()
        assert top.values[i][order].tolist() == rollout.sampling_mask.row_logprobs(i).tolist()
