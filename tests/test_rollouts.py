"""Rollouts go to Parquet and come back bit for bit."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline import Rollout, Rollouts, SamplingMask, TopLogprobs
from pipeline.results.audit_record import DTYPES, AuditRecord


def a_record(rng, n):
    """An audit record of any numbers, each array in its dtype."""
    sizes = {
        "token_ids": rng.integers(1, 5, n),
        "proposal_probs": rng.integers(0, 3, n),
        "bounds": rng.integers(0, 3, n),
    }
    offsets = {name: np.concatenate([[0], np.cumsum(size)]) for name, size in sizes.items()}
    total = {"weights": offsets["token_ids"][-1]} | {name: ends[-1] for name, ends in offsets.items()}
    values = {name: rng.integers(0, 2, total.get(name, n)).astype(dtype) for name, dtype in DTYPES.items()}
    values["draft_probs"][0] = np.nan
    values |= {"offsets": offsets["token_ids"], "proposal_offsets": offsets["proposal_probs"]}
    values["bound_offsets"] = offsets["bounds"]
    return AuditRecord(**values)


def a_rollout(n=5, *, mode="support", top=3, masks=True, audit=True, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, n)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    mask = SamplingMask(
        token_ids=rng.integers(0, 50000, offsets[-1]).astype(np.int32),
        offsets=offsets,
        logprobs=-rng.random(offsets[-1] if mode == "support" else n, np.float32),
        mode=mode,
    )
    tops = TopLogprobs(
        ids=rng.integers(-1, 9, (n, top)).astype(np.int32),
        values=np.where(rng.random((n, top)) < 0.2, -np.inf, -rng.random((n, top))).astype(np.float32),
    )
    return Rollout(
        prompt_token_ids=rng.integers(0, 9, 4).astype(np.int32),
        token_ids=rng.integers(0, 9, n).astype(np.int32),
        text="naïve ☃",
        finish_reason="eos",
        logprobs=-rng.random(n, np.float32),
        sampling_mask=mask if masks else None,
        top_logprobs=tops if top else None,
        num_rounds=2,
        num_accepted=np.array([0, 3], np.int32),
        seed=2**64 - 1,
        prompt_index=0,
        sample_index=1,
        params_index=0,
        prompt_id="p-0",
        audit=a_record(rng, n) if audit else None,
    )


def same(a, b):
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b and type(a) is type(b)


def test_parquet_round_trip(tmp_path):
    rollouts = Rollouts(
        [
            a_rollout(),
            a_rollout(7, mode="selected", top=0, seed=1),
            a_rollout(masks=False, top=2, audit=False, seed=2),
            *Rollout.refused("top_k=None, expected a finite top_k", 3, 2, 1),
        ],
        {"target": {"name": "demo"}},
    )
    path = rollouts.to_parquet(tmp_path / "rollouts.parquet")
    back = Rollouts.from_parquet(path)
    assert back.provenance == rollouts.provenance
    assert len(back) == len(rollouts)
    for a, b in zip(rollouts, back, strict=True):
        assert same(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["rollouts.parquet"]
    assert [r.error for r in back.failed] == ["top_k=None, expected a finite top_k"] * 2


def test_an_empty_set(tmp_path):
    assert Rollouts.from_parquet(Rollouts().to_parquet(tmp_path / "none.parquet")) == []
    with pytest.raises(ValueError, match=r"expected a file: read those of a folder one by one$"):
        Rollouts.from_parquet(tmp_path)


def test_provenance_is_in_the_metadata(tmp_path):
    path = Rollouts([a_rollout()], {"seeds": [1]}).to_parquet(tmp_path / "a.parquet")
    assert json.loads(pq.read_schema(path).metadata[b"specmask"])["provenance"] == {"seeds": [1]}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = Rollouts([a_rollout()], {"which": "old"}).to_parquet(tmp_path / "a.parquet")

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="no space left"):
        Rollouts([a_rollout()], {"which": "new"}).to_parquet(path)
    assert Rollouts.from_parquet(path).provenance == {"which": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_another_file_is_refused(tmp_path):
    import pyarrow as pa

    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"format=None in .*, expected 'specmask.rollouts.v3'"):
        Rollouts.from_parquet(tmp_path / "other.parquet")


def test_a_slice_keeps_the_provenance(tmp_path):
    rollouts = Rollouts([a_rollout(), a_rollout(seed=1)], {"which": "this"})
    assert isinstance(rollouts[1:], Rollouts)
    assert rollouts[1:].provenance == {"which": "this"}
    assert rollouts[-1] is rollouts[1:][0]
    assert rollouts[0] == rollouts[0]


def test_a_repr_is_a_line():
    long = dataclasses.replace(a_rollout(2000), text="The primary colours are: Red, Blue, and Yellow.", prompt_id=None)
    (refused,) = Rollout.refused(f"prompt='{'x' * 200}', expected a string", 3, 1, 0)
    shown = [
        "<Rollout of prompt 0 ('p-0'), sample 1: 4 prompt tokens, 5 tokens, eos, 'naïve ☃'>",
        "<Rollout of prompt 0, sample 1: 4 prompt tokens, 2000 tokens, eos, 'The primary colours are: Red, Blue, ...>",
        f"<Rollout of prompt 3, sample 0: 0 prompt tokens, 0 tokens, abort, error=\"prompt='{'x' * 68}...>",
    ]
    rollouts = Rollouts([a_rollout(), long, refused], {"target": {"name": "demo"}})
    assert [repr(rollout) for rollout in rollouts] == [str(rollout) for rollout in rollouts] == shown
    assert repr(rollouts) == str(rollouts) == "<Rollouts: 3, of which 1 failed, 2005 tokens>"
    assert repr(Rollouts()) == "<Rollouts: 0, of which 0 failed, 0 tokens>"
    assert repr(rollouts[1:]) == "<Rollouts: 2, of which 1 failed, 2000 tokens>"


def test_the_mask_iterates_a_row_a_token():
    mask = a_rollout().sampling_mask
    rows = list(mask)
    assert len(rows) == len(mask) == 5
    assert [len(row) for row in rows] == mask.sizes.tolist()
    assert np.concatenate(rows).tolist() == mask.token_ids.tolist()
    assert mask[-1].tolist() == rows[-1].tolist()
    assert len(mask.row_logprobs(2)) == len(rows[2])
    with pytest.raises(IndexError, match="row=5, expected one of 5 rows"):
        mask[5]
    with pytest.raises(ValueError, match="mode='selected', expected \"support\""):
        a_rollout(mode="selected").sampling_mask.row_logprobs(0)
