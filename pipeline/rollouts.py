"""A list of rollouts with what produced them; to Parquet and back."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, SupportsIndex, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.rollout import Rollout, SamplingMask, TopLogprobs

FORMAT = "specmask.rollouts.v1"

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
    ]
)
"""One row a rollout. Masks are CSR (see `SamplingMask`); `top_ids` and `top_values` are [n, top_logprobs_k], row-major;
a null is what wasn't asked for. The file's metadata has the key "specmask": JSON with `format` and `provenance`; a
rollout's sampling parameters are ``provenance["params"][params_index]``."""


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
        metadata = json.dumps({"format": FORMAT, "provenance": self.provenance}, allow_nan=False)
        table = _to_table(self).replace_schema_metadata({"specmask": metadata})
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    @classmethod
    def from_parquet(cls, path: str | os.PathLike[str]) -> Rollouts:
        """Read back what `to_parquet` wrote, bit for bit.

        Raises:
            ValueError: The file isn't one of these.
        """
        table = pq.read_table(path)
        held = json.loads((table.schema.metadata or {}).get(b"specmask", b"{}"))
        if held.get("format") != FORMAT:
            raise ValueError(
                f"format={held.get('format')!r} in {os.fspath(path)}, expected {FORMAT!r}: a file written by to_parquet"
            )
        return cls(_from_table(table), held["provenance"])


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
    return [_rollout({name: column[i] for name, column in columns.items()}) for i in range(table.num_rows)]


def _rollout(row: dict[str, Any]) -> Rollout:
    mask = top = None
    if row["mask_mode"] is not None:
        mask = SamplingMask(row["mask_token_ids"], row["mask_offsets"], row["mask_logprobs"], row["mask_mode"])
    if row["top_logprobs_k"] is not None:
        shape = (-1, row["top_logprobs_k"])
        top = TopLogprobs(row["top_ids"].reshape(shape), row["top_values"].reshape(shape))
    own = {field.name: row[field.name] for field in fields(Rollout) if field.name in row}
    return Rollout(**own, sampling_mask=mask, top_logprobs=top)


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
