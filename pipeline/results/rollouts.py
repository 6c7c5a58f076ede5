"""A list of rollouts with what produced them; to Parquet and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import InvalidRequest
from pipeline.files import written_whole
from pipeline.results.audit_record import DTYPES, AuditRecord
from pipeline.results.mask_checks import check_shape
from pipeline.results.rollout import Rollout, SamplingMask, TopLogprobs

FORMAT = "specmask.rollouts.v3"
METADATA_KEY = b"specmask"

SCHEMA = pa.schema(
    [
        pa.field("prompt_index", pa.int64()),
        pa.field("sample_index", pa.int32()),
        pa.field("params_index", pa.int32()),
        pa.field("seed", pa.uint64()),
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("mask_mode", pa.string()),
        pa.field("mask_token_ids", pa.large_list(pa.int32())),
        pa.field("mask_offsets", pa.list_(pa.int64())),
        pa.field("mask_logprobs", pa.large_list(pa.float32())),
        pa.field("top_logprobs_k", pa.int32()),
        pa.field("top_ids", pa.list_(pa.int32())),
        pa.field("top_values", pa.list_(pa.float32())),
        pa.field("num_rounds", pa.int32()),
        pa.field("num_accepted", pa.list_(pa.int32())),
        pa.field("prompt_id", pa.string()),
        *(pa.field(f"audit_{name}", pa.large_list(pa.from_numpy_dtype(dtype))) for name, dtype in DTYPES.items()),
    ]
)
"""One row a rollout; a null is what wasn't asked for.

| Column | Holds |
|---|---|
| prompt_index, sample_index | which prompt, which of its samples |
| params_index | which of the parameters in the metadata |
| seed | of this sample; null if it never started |
| prompt_token_ids, token_ids | of the prompt; of the output, n tokens |
| text, finish_reason, error | see `Rollout` |
| logprobs | n, each token's under the policy it was drawn from |
| mask_mode | "support", "selected", or null without a mask |
| mask_token_ids, mask_offsets | CSR: support i is mask_token_ids[mask_offsets[i]:mask_offsets[i + 1]], ascending |
| mask_logprobs | beside mask_token_ids in "support" mode; n in "selected" mode |
| top_logprobs_k | K, or null |
| top_ids, top_values | [n, K], row after row; -1 and -inf behind the end of a smaller support |
| num_rounds, num_accepted | verification rounds; the drafts accepted in each |
| prompt_id | the prompts file's own id, or null |
| audit_* | the arrays of `AuditRecord`, or null |

The schema's metadata has the key "specmask": JSON with `format` and `provenance`; a rollout's sampling parameters are
``provenance["params"][params_index]``.
"""


class Rollouts(list[Rollout]):
    """Rollouts in the order of the prompts, samples of a prompt side by side.

    Attributes:
        provenance: What produced them: models with their hashes, options, parameters, versions. JSON can hold it.
    """

    def __init__(self, rollouts: Iterable[Rollout] = (), provenance: dict[str, Any] | None = None) -> None:
        super().__init__(rollouts)
        self.provenance = provenance or {}

    @overload
    def __getitem__(self, which: SupportsIndex) -> Rollout: ...

    @overload
    def __getitem__(self, which: slice) -> Rollouts: ...

    def __getitem__(self, which: SupportsIndex | slice) -> Rollout | Rollouts:
        """One rollout; a slice keeps the provenance."""
        if isinstance(which, slice):
            return Rollouts(super().__getitem__(which), self.provenance)
        return super().__getitem__(which)

    def __repr__(self) -> str:
        """A line for a reader; one rollout has a line of its own."""
        tokens = sum(len(rollout.token_ids) for rollout in self)
        return f"<Rollouts: {len(self)}, of which {len(self.failed)} failed, {tokens} tokens>"

    @property
    def failed(self) -> list[Rollout]:
        """Those that were refused or aborted; each says why in `error`."""
        return [rollout for rollout in self if not rollout.ok]

    def to_parquet(self, path: str | os.PathLike[str]) -> Path:
        """Write one row a rollout (`SCHEMA`), with the provenance in the metadata.

        The file is written under a temporary name beside `path`, flushed to disk and renamed: `path` never holds
        half of it.
        """
        path = Path(path)
        table = self.to_arrow()
        with written_whole(path) as file:
            pq.write_table(table, file, compression="zstd")
        return path

    @classmethod
    def from_parquet(cls, path: str | os.PathLike[str]) -> Rollouts:
        """Read back what `to_parquet` wrote, bit for bit.

        Raises:
            ValueError: The file isn't one of these; a row's arrays don't line up (see `from_arrow`); a folder.
        """
        if os.path.isdir(path):
            raise ValueError(f"path={os.fspath(path)!r}, expected a file: read those of a folder one by one")
        return cls.from_arrow(pq.read_table(path), os.fspath(path))

    def to_arrow(self) -> pa.Table:
        """One row a rollout (`SCHEMA`), with the provenance in the schema's metadata."""
        metadata = json.dumps({"format": FORMAT, "provenance": self.provenance}, allow_nan=False)
        return _to_table(self).replace_schema_metadata({METADATA_KEY: metadata})

    @classmethod
    def from_arrow(cls, table: pa.Table, source: str = "the table") -> Rollouts:
        """What `to_arrow` gave, bit for bit.

        Args:
            table: Columns may stand in any order; others than the schema's are left out.
            source: What messages call it.

        Raises:
            ValueError: Another format, or a missing column; a row whose tokens, log-probabilities, mask and top K
                aren't equally many, by its index.
        """
        held = json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}"))
        if held.get("format") != FORMAT:
            raise ValueError(
                f"format={held.get('format')!r} in {source}, expected {FORMAT!r}: a file written by to_parquet"
            )
        missing = [name for name in SCHEMA.names if name not in table.schema.names]
        if missing:
            raise ValueError(f"columns {missing} of {source}: missing, expected all of the schema's")
        return cls(_from_table(table.select(SCHEMA.names).cast(SCHEMA)), held["provenance"])


def _to_table(rollouts: Sequence[Rollout]) -> pa.Table:
    masks = [rollout.sampling_mask for rollout in rollouts]
    tops = [rollout.top_logprobs for rollout in rollouts]

    def of(things: list[Any], get: Callable[[Any], Any]) -> list[Any]:
        return [None if thing is None else get(thing) for thing in things]

    values: dict[str, list[Any]] = {
        "prompt_token_ids": [rollout.prompt_token_ids for rollout in rollouts],
        "token_ids": [rollout.token_ids for rollout in rollouts],
        "logprobs": [rollout.logprobs for rollout in rollouts],
        "mask_mode": of(masks, lambda mask: mask.mode),
        "mask_token_ids": of(masks, lambda mask: mask.token_ids),
        "mask_offsets": of(masks, lambda mask: mask.offsets),
        "mask_logprobs": of(masks, lambda mask: mask.logprobs),
        "top_logprobs_k": of(tops, lambda top: top.ids.shape[1]),
        "top_ids": of(tops, lambda top: top.ids.ravel()),
        "top_values": of(tops, lambda top: top.values.ravel()),
        "num_accepted": [rollout.num_accepted for rollout in rollouts],
    }
    records = [rollout.audit for rollout in rollouts]
    values |= {f"audit_{name}": [getattr(record, name, None) for record in records] for name in DTYPES}
    columns = []
    for column in SCHEMA:
        rows = values[column.name] if column.name in values else [getattr(r, column.name) for r in rollouts]
        columns.append(_list_column(rows, column.type) if _is_list(column.type) else pa.array(rows, column.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _from_table(table: pa.Table) -> list[Rollout]:
    columns = {
        name: _list_rows(table[name]) if _is_list(table[name].type) else table[name].to_pylist()
        for name in SCHEMA.names
    }
    return [_rollout(i, {name: column[i] for name, column in columns.items()}) for i in range(table.num_rows)]


def _rollout(index: int, row: dict[str, Any]) -> Rollout:
    mask = top = record = None
    n = len(row["token_ids"])
    if row["logprobs"] is not None and len(row["logprobs"]) != n:
        raise ValueError(f"row {index}: logprobs={len(row['logprobs'])}, expected {n}: one a token")
    if row["mask_mode"] is not None:
        mask = SamplingMask(row["mask_token_ids"], row["mask_offsets"], row["mask_logprobs"], row["mask_mode"])
        try:
            check_shape(mask, n)
        except InvalidRequest as error:
            raise ValueError(f"row {index}: {error}") from None
    if row["top_logprobs_k"] is not None:
        shape = (n, row["top_logprobs_k"])
        for name in ("top_ids", "top_values"):
            if row[name] is None or len(row[name]) != n * row["top_logprobs_k"]:
                got = None if row[name] is None else len(row[name])
                raise ValueError(f"row {index}: {name}={got}, expected {shape[0]} x {shape[1]}")
        top = TopLogprobs(row["top_ids"].reshape(shape), row["top_values"].reshape(shape))
    if row["audit_rounds"] is not None:
        record = AuditRecord(**{name: row[f"audit_{name}"] for name in DTYPES})
    own = {field.name: row[field.name] for field in fields(Rollout) if field.name in row}
    return Rollout(**own, sampling_mask=mask, top_logprobs=top, audit=record)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _list_column(rows: list[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    sizes = [0 if row is None else len(row) for row in rows]
    present = [row for row in rows if row is not None and len(row)]
    dtype = kind.value_type.to_pandas_dtype()
    flat = np.concatenate(present, dtype=dtype) if present else np.empty(0, dtype)
    build = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    offsets = pa.array(
        np.concatenate([[0], np.cumsum(sizes)]), pa.int64() if build is pa.LargeListArray else pa.int32()
    )
    return build.from_arrays(
        offsets, pa.array(flat, kind.value_type), type=kind, mask=pa.array([row is None for row in rows], pa.bool_())
    )


def _list_rows(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    rows: list[np.ndarray | None] = []
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        rows += [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(chunk))]
    return rows
