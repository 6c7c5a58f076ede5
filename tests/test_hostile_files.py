"""Weight files made to harm: each is refused by name, before memory is taken for what it claims."""

import json
import os
import pickle
import struct
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_loaders import load_draft, load_target
from model_loaders.errors import CheckpointError
from model_loaders.file_checks import MOST_ARRAY_ENTRIES, check_gguf, num_elements
from tests import pipes, tiny_drafts
from tests.tiny_models import write_tiny_target


@pytest.fixture
def folder(tmp_path):
    return write_tiny_target(tmp_path / "target")


def refused(path):
    """The message with which a target is refused, in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as refusal:
            load_target(path, device="cpu")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    return str(refusal.value)


# --- safetensors ----------------------------------------------------------------------------------------------------


def header_changed(data, change):
    """The file with another header over the same data."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


NAME = "model.norm.weight"
HEADERS = {
    "beyond the file": lambda h: h[NAME].update(data_offsets=[h[NAME]["data_offsets"][0], 1 << 40]),
    "before it": lambda h: h[NAME].update(data_offsets=[-128, 0]),
    "backwards": lambda h: h[NAME].update(data_offsets=h[NAME]["data_offsets"][::-1]),
    "overlapping": lambda h: h[NAME].update(data_offsets=h["lm_head.weight"]["data_offsets"]),
    "another's range": lambda h: h.pop(NAME) and None,
    "a shape too large": lambda h: h[NAME].update(shape=[1 << 40]),
    "a shape that wraps": lambda h: h[NAME].update(shape=[1 << 32, 1 << 32, 4]),
    "a negative shape": lambda h: h[NAME].update(shape=[-32]),
    "a shape of text": lambda h: h[NAME].update(shape="32"),
    "no such dtype": lambda h: h[NAME].update(dtype="P64"),
    "nested": lambda h: "[" * 100_000,
    "twice": lambda h: json.dumps(h)[:-1] + f', "{NAME}": {json.dumps(h["lm_head.weight"])}}}',
}


@pytest.mark.parametrize("change", HEADERS)
def test_hostile_safetensors_headers(folder, change):
    path = folder / "model.safetensors"
    path.write_bytes(header_changed(path.read_bytes(), HEADERS[change]))
    assert "can't be read as safetensors: SafetensorError" in refused(folder)


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_hostile_header_lengths(folder, length):
    """Also with a file that is as long as it says."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    if 100_000_000 < length < 1 << 33:
        os.truncate(path, length + 8)  # a file of holes
    assert "can't be read as safetensors: SafetensorError" in refused(folder)


def test_a_pickle_under_another_name(folder):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "sprung"),))

    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    assert "can't be read as safetensors" in refused(folder)
    assert not (folder / "sprung").exists()


# --- configs of models larger than their files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 1 << 40}, "weights, expected about the"),
        ({"intermediate_size": 1 << 40}, "weights, expected about the"),
        ({"hidden_size": 1 << 22}, "weights, expected about the"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, expected at most 1000"),
        ({"num_hidden_layers": 10**9, "model_type": "qwen3"}, "num_hidden_layers=1000000000, expected at most 1000"),
    ],
)
def test_a_config_of_a_larger_model(folder, changes, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 1 << 40}, "weights, expected about the"),
        ({"num_attention_heads": 1 << 34, "num_key_value_heads": 1}, "weights, expected about the"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers=1000000000, expected at most 1000"),
    ],
)
def test_a_draft_s_config_of_a_larger_model(tmp_path, changes, message):
    folder = tiny_drafts.write(tmp_path, "dflash", pipes.target(), layer_ids=(0, 1))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, pipes.target())


def test_models_that_are_as_large_as_their_files_load(tmp_path):
    for tie in (False, True):
        folder = write_tiny_target(tmp_path / str(tie), tie=tie)
        assert load_target(folder, device="cpu").num_layers == 4
        tensors = load_file(folder / "model.safetensors")
        assert num_elements([folder / "model.safetensors"]) == {key: t.numel() for key, t in tensors.items()}


# --- GGUF -----------------------------------------------------------------------------------------------------------


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"a", shape=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(*, keys=(), tensors=(), version=3, num_keys=None, num_tensors=None, size=256, magic=b"GGUF"):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32 + size)


def array(kind, count, content=b""):
    return text(b"k") + struct.pack("<IIQ", 9, kind, count) + content


HUGE = (1 << 64) - 1
GGUF_FILES = {
    "empty": (b"", "can't be read as GGUF"),
    "no GGUF": (gguf(magic=b"GGML"), "magic=b'GGML', expected GGUF"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "expected 2 or 3 in little endian"),
    "version 1": (gguf(version=1), "version=1, expected 2 or 3"),
    "too many keys": (gguf(num_keys=HUGE), "expected"),
    "too many tensors": (gguf(num_tensors=HUGE, size=0), "expected an end within the file's"),
    "a key without an end": (gguf(keys=[struct.pack("<Q", HUGE)]), "length of a string="),
    "a long key": (gguf(keys=[struct.pack("<Q", 1 << 20)]), "expected an end within the file's"),
    "an endless array": (gguf(keys=[array(0, HUGE)]), f"expected at most {MOST_ARRAY_ENTRIES}"),
    "a long array": (gguf(keys=[array(12, 1 << 20)]), "expected an end within the file's"),
    "an array of long text": (gguf(keys=[array(8, 2, text(b"x") + struct.pack("<Q", 1 << 21))]), "within the file's"),
    "arrays in an array": (gguf(keys=[array(9, 1)]), "type of b'k'=9, expected a scalar"),
    "no such type": (gguf(keys=[text(b"k") + struct.pack("<I", 77)]), "type of b'k'=77"),
    "alignment 0": (gguf(keys=[text(b"general.alignment") + struct.pack("<II", 4, 0)]), "general.alignment=0"),
    "many dimensions": (gguf(tensors=[tensor(shape=(2,) * 5)]), "dimensions of a=5, expected at most 4"),
    "endless dimensions": (gguf(tensors=[text(b"a") + struct.pack("<I", 1 << 31)]), "expected at most 4"),
    "a shape that wraps": (gguf(tensors=[tensor(shape=(1 << 33, 1 << 33))]), "range of a="),
    "beyond the file": (gguf(tensors=[tensor(offset=256)]), "range of a=128 bytes at 256"),
    "too long": (gguf(tensors=[tensor(shape=(96,))]), "range of a=384 bytes at 0"),
    "overlapping": (gguf(tensors=[tensor(), tensor(b"b", offset=96)]), "range of b=128 bytes at 96"),
    "out of line": (gguf(tensors=[tensor(offset=7)]), "range of a=128 bytes at 7"),
    "twice": (gguf(tensors=[tensor(), tensor(offset=128)]), "tensors=a twice"),
    "endless layers": (
        gguf(keys=[text(b"llama.block_count") + struct.pack("<II", 4, 1 << 31)]),
        "expected at most 1000",
    ),
    "half a block": (gguf(tensors=[tensor(shape=(33,), kind=3)]), "rows of whole blocks of 32"),
    "no such kind": (gguf(tensors=[tensor(kind=4711)]), "can't be read as GGUF: ValueError"),
    "no text": (gguf(tensors=[tensor(b"\xff\xfe")]), "can't be read as GGUF: UnicodeDecodeError"),
}


@pytest.mark.parametrize("name", GGUF_FILES)
def test_hostile_gguf(tmp_path, name):
    pytest.importorskip("gguf")
    data, message = GGUF_FILES[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refusal:
        check_gguf(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert message in refused(path)


def test_a_good_gguf_is_walked(tmp_path):
    pytest.importorskip("gguf")
    keys = [array(8, 2, text(b"x") + text(b"yy")), array(4, 3, b"\0" * 12), text(b"f") + struct.pack("<If", 6, 1.0)]
    (tmp_path / "x.gguf").write_bytes(gguf(keys=keys, tensors=[tensor(), tensor(b"b", (32, 2), 3, 128)]))
    assert check_gguf(tmp_path / "x.gguf") == {"a": 32, "b": 64}


def test_every_cut_of_a_header_is_refused(tmp_path):
    pytest.importorskip("gguf")
    whole = gguf(keys=[array(8, 2, text(b"x") + text(b"yy"))], tensors=[tensor()], size=128)
    path = tmp_path / "x.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            check_gguf(path)
    path.write_bytes(whole)
    assert check_gguf(path) == {"a": 32}


def test_extra_weights_cost_no_memory(folder):
    """A checkpoint may hold more than the model wants; it is refused by name."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"extra": torch.zeros(1 << 20)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "unexpected tensors extra" in refused(folder)
