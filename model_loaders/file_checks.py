"""Weight files before anything in them is used: every size and offset against the file that it claims to describe.

safetensors' own reader checks its headers: at most 100 MB, ranges without gaps or overlaps that end with the file, each
as long as its shape and dtype say. gguf's reads what a header claims, so a GGUF header is walked here first. And a
config may describe a model larger than any file: memory is only taken for one that the files can fill.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from model_loaders.errors import CheckpointError, explained

MOST_ARRAY_ENTRIES = 1 << 23
"""Of all a GGUF header's arrays together: gguf makes an object of each. The largest vocabularies have 2**18 tokens."""
LONGEST_GGUF_STRING = 1 << 24
MOST_LAYERS = 1000
"""Of a model; the deepest ones have a fifth. Lists are made of them before any weight is looked at."""
# safetensors' names of the types that weights may have; any other would be cast in silence.
FLOATING = ("F64", "F32", "F16", "BF16")
_SPARE = 1 << 24  # weights that a model may have beyond twice what its files hold

# GGUF's types of metadata: bytes of the scalars; 8 is text, 9 an array.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


def num_elements(files: Iterable[Path]) -> dict[str, int]:
    """The elements of every tensor in these safetensors or GGUF files, by name; only headers are read.

    Raises:
        CheckpointError: A file whose header claims what the file can't hold.
    """
    found: dict[str, int] = {}
    for path in files:
        if path.suffix == ".gguf":
            found |= check_gguf(path)
            continue
        try:
            with safe_open(path, framework="pt") as stream:
                found |= {key: math.prod(stream.get_slice(key).get_shape()) for key in stream.keys()}  # noqa: SIM118
        except Exception as error:
            raise CheckpointError(f"{path} can't be read as safetensors: {type(error).__name__}: {error}") from error
    return found


def other_dtypes(files: Iterable[Path]) -> dict[str, tuple[Path, str]]:
    """The tensors that aren't floating, each with its file and dtype; only headers are read.

    Raises CheckpointError for a file that isn't safetensors.
    """
    found: dict[str, tuple[Path, str]] = {}
    for path in files:
        with explained(f"{path} can't be read as safetensors"), safe_open(path, framework="pt") as stream:
            for key in stream.keys():  # noqa: SIM118 (not a dict)
                dtype = stream.get_slice(key).get_dtype()
                if dtype not in FLOATING:
                    found[key] = (path, dtype)
    return found


def refuse_other_dtypes(tensors: Mapping[str, tuple[Path, str]]) -> None:
    """Raises CheckpointError if there is a tensor in the answer of `other_dtypes`."""
    for key, (path, dtype) in tensors.items():
        raise CheckpointError(
            f"{path}: tensor {key} has dtype {dtype}, expected one of {', '.join(FLOATING)}: quantised weights "
            "aren't supported"
        )


def refuse_larger_model(make: Callable[[], nn.Module], elements: dict[str, int], name: str) -> None:
    """Raise CheckpointError for a config of a model that these tensors can't fill, without making it.

    Args:
        make: Makes the model; it is called for shapes only, on torch's meta device.
        elements: `num_elements` of its files.
    """
    with torch.device("meta"):
        model = make()
    wanted = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    held = sum(elements.values())
    if wanted > 2 * held + _SPARE:
        raise CheckpointError(
            f"{name}: a model of {wanted} weights, expected about the {held} of its files: config.json and weights "
            "don't belong together"
        )


def check_gguf(path: Path) -> dict[str, int]:
    """Walk a GGUF header; the elements of every tensor, by name.

    Raises:
        CheckpointError: No GGUF file of version 2 or 3 in little endian, or a length, count, type or offset that the
            file can't have.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).tensors(lambda kind: GGML_QUANT_SIZES[GGMLQuantizationType(kind)])
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} can't be read as GGUF: {type(error).__name__}: {error}") from error


class _Walk:
    """Reads a header from front to back and never beyond the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._entries = path, data, 0, 0
        self._alignment = 32

    def tensors(self, block_of: Callable[[int], tuple[int, int]]) -> dict[str, int]:
        if self._take(4) != b"GGUF":
            self._refuse("magic", bytes(self._data[:4]), "GGUF")
        version = self._uint32()
        if version not in (2, 3):
            self._refuse("version", version, "2 or 3 in little endian")
        num_tensors, num_keys = self._uint64(), self._uint64()
        # The shortest key takes 13 bytes, the shortest tensor 24: no count leads to a walk longer than the file.
        for _ in range(num_keys):
            self._key_and_value()
        ranges, found = [], dict[str, int]()
        for _ in range(num_tensors):
            name = self._text().decode("utf-8")
            dimensions = self._uint32()
            if dimensions > _MOST_DIMENSIONS:
                self._refuse(f"dimensions of {name}", dimensions, f"at most {_MOST_DIMENSIONS}")
            shape = [self._uint64() for _ in range(dimensions)]
            kind, offset = self._uint32(), self._uint64()
            block, size = block_of(kind)
            count = math.prod(shape)
            if count % block or (shape and shape[0] % block):
                self._refuse(f"shape of {name}", shape, f"rows of whole blocks of {block}")
            if name in found:
                self._refuse("tensors", f"{name} twice", "one of each name")
            found[name] = count
            ranges.append((offset, count // block * size, name))
        start = -(-self._at // self._alignment) * self._alignment
        end = 0
        for offset, size, name in sorted(ranges):
            if offset % self._alignment or offset < end or start + offset + size > len(self._data):
                self._refuse(
                    f"range of {name}",
                    f"{size} bytes at {offset}",
                    f"one from {end} on, within the file's {len(self._data) - start} bytes of data",
                )
            end = offset + size
        return found

    def _key_and_value(self) -> None:
        key, kind = self._text(), self._uint32()
        if kind == _ARRAY:
            kind, count = self._uint32(), self._uint64()
            self._entries += count
            if self._entries > MOST_ARRAY_ENTRIES:
                self._refuse(f"entries of arrays up to {key!r}", self._entries, f"at most {MOST_ARRAY_ENTRIES}")
            if kind == _TEXT:
                for _ in range(count):
                    self._text()
                return
            self._take(count * self._scalar(key, kind))
        elif kind == _TEXT:
            self._text()
        else:
            value = self._take(self._scalar(key, kind))
            if key.endswith(b".block_count") and int.from_bytes(value, "little") > MOST_LAYERS:
                self._refuse(key.decode(errors="replace"), int.from_bytes(value, "little"), f"at most {MOST_LAYERS}")
            if key == b"general.alignment":
                self._alignment = int.from_bytes(value, "little")
                if self._alignment not in (1 << power for power in range(17)):
                    self._refuse("general.alignment", self._alignment, "a power of two up to 65536")

    def _scalar(self, key: bytes, kind: int) -> int:
        if kind not in _SCALARS:
            self._refuse(f"type of {key!r}", kind, "a scalar, text, or an array of them")
        return _SCALARS[kind]

    def _text(self) -> bytes:
        length = self._uint64()
        if length > LONGEST_GGUF_STRING:
            self._refuse("length of a string", length, f"at most {LONGEST_GGUF_STRING}")
        return self._take(length)

    def _uint32(self) -> int:
        return struct.unpack("<I", self._take(4))[0]

    def _uint64(self) -> int:
        return struct.unpack("<Q", self._take(8))[0]

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            self._refuse("header", f"{size} bytes at {self._at}", f"an end within the file's {len(self._data)} bytes")
        self._at += size
        return self._data[self._at - size : self._at]

    def _refuse(self, name: str, value: Any, expected: str) -> None:
        raise CheckpointError(f"{self._path}: {name}={value}, expected {expected}; fetch the file again")
