"""Targets: ragged rows against a cache-less forward, batch independence, taps, and every refusal."""

import hashlib
import json
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from model_loaders.errors import CheckpointError
from model_loaders.files import sha256_of
from model_loaders.layers.attention import packed_sdpa
from model_loaders.layers.packed_linear import PackedLinear
from model_loaders.targets import load_target
from tests.tiny_models import write_tiny_target

ARCHITECTURES = ("llama", "qwen3", "mistral", "qwen3_moe", "smollm3")
CLOSE = {"atol": 3e-5, "rtol": 1e-5}  # logits reach 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(arch="llama"):
        if arch not in made:
            made[arch] = write_tiny_target(tmp_path_factory.mktemp(arch), arch)
        return made[arch]

    return folder


@pytest.fixture(params=ARCHITECTURES)
def target(request, folders):
    return load_target(folders(request.param), device="cpu")


@pytest.fixture
def llama(folders):
    return load_target(folders(), device="cpu")


def tokens(rows, width, seed=1):
    return torch.randint(0, 320, (rows, width), generator=torch.Generator().manual_seed(seed))


def full_logits(target, ids):
    with torch.inference_mode():
        return target.model(ids, use_cache=False).logits


def at(starts, width):
    return torch.tensor(starts)[:, None] + torch.arange(width)


def prefill(target, cache, ids, lengths, slots=None):
    for row, n in enumerate(lengths):
        slot = row if slots is None else slots[row]
        target.forward(ids[row : row + 1, :n], torch.arange(n)[None], cache, slots=[slot], last_only=True)


def test_ragged_rows_equal_a_full_forward(target):
    """Rows of different lengths, blocks of mixed widths, rejected entries overwritten, a slot reused."""
    ids = tokens(3, 90)
    full = full_logits(target, ids)
    lengths = [5, 17, 33]
    cache = target.new_cache(3, 96)
    prefill(target, cache, ids, lengths)
    g = torch.Generator().manual_seed(2)
    for width in (1, 4, 8, 1, 5):
        block = ids.gather(1, at(lengths, width)).clone()
        accepted = torch.randint(1, width + 1, (3,), generator=g).tolist()
        for row, n in enumerate(accepted):  # what follows the accepted tokens is a wrong draft
            block[row, n:] = (block[row, n:] + 1) % 320
        out = target.forward(block, at(lengths, width), cache)
        for row, n in enumerate(accepted):
            torch.testing.assert_close(out.logits[row, :n], full[row, lengths[row] : lengths[row] + n], **CLOSE)
            lengths[row] += n
    # Slot 1 goes to another, shorter request; its old entries lie beyond the new row.
    fresh = tokens(1, 20, seed=7)
    out = target.forward(fresh[:, :6], torch.arange(6)[None], cache, slots=[1])
    torch.testing.assert_close(out.logits, full_logits(target, fresh)[:, :6], **CLOSE)


def test_snapshots_share_a_prefill(llama):
    ids = tokens(1, 30)
    cache = llama.new_cache(6, 64)
    prefill(llama, cache, ids, [20])
    kept = cache.snapshot(0, 20)
    cache.copy_row(0, 3, 20)
    expected = llama.forward(ids[:, 20:25], at([20], 5), cache).logits
    llama.forward(tokens(1, 30, seed=9), torch.arange(30)[None], cache)  # the first slot moves on
    cache.restore(5, kept)
    for slot in (3, 5):
        assert torch.equal(llama.forward(ids[:, 20:25], at([20], 5), cache, slots=[slot]).logits, expected)


def test_padding_after_a_row(llama):
    """A batched prefill: short rows are padded at the positions that follow them."""
    ids = tokens(2, 40)
    cache = llama.new_cache(2, 64)
    llama.forward(ids[:, :20], torch.arange(20).expand(2, -1), cache)
    out = llama.forward(ids.gather(1, at([8, 20], 3)), at([8, 20], 3), cache)
    full = full_logits(llama, ids)
    torch.testing.assert_close(out.logits[0], full[0, 8:11], **CLOSE)
    torch.testing.assert_close(out.logits[1], full[1, 20:23], **CLOSE)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_row_does_not_depend_on_its_batch(arch, folders):
    """On the CPU bit for bit: alone or not, in another slot, among longer rows, a block or step by step."""
    target = load_target(folders(arch), device="cpu")
    packed = isinstance(target.layers[0].mlp.up_proj, PackedLinear)
    ids, lengths = tokens(4, 120), [5, 17, 60, 97]
    cache = target.new_cache(8, 700)
    prefill(target, cache, ids, lengths)
    for row, n in enumerate(lengths):
        cache.copy_row(row, 7 - row, n)

    def run(width, rows=(0, 1, 2, 3), slots=None, kv_length=None):
        positions = at([lengths[r] for r in rows], width)
        slots = list(rows) if slots is None else slots
        return target.forward(
            ids[list(rows)].gather(1, positions), positions, cache, slots=slots, kv_length=kv_length
        ).logits

    same = torch.equal if packed else lambda a, b: torch.allclose(a, b, **CLOSE)
    for width in (1, 2, 8):
        together = run(width)
        assert same(run(width, slots=[7, 6, 5, 4]), together)
        assert same(run(width, kv_length=600), together)
        for row in range(4):
            assert same(run(width, rows=(row,)), together[row : row + 1])
    steps = torch.cat(
        [
            target.forward(ids.gather(1, at(lengths, 8))[:, i : i + 1], at(lengths, 8)[:, i : i + 1], cache).logits
            for i in range(8)
        ],
        dim=1,
    )
    assert same(steps, run(8))


def test_nan_of_a_released_row_stays_away(llama):
    cache = llama.new_cache(1, 64)
    ids = tokens(1, 30)
    prefill(llama, cache, ids, [30])
    for layer in cache.layers:
        layer.keys[0, :, 20:].fill_(float("nan"))
        layer.values[0, :, 20:].fill_(float("inf"))
    cache.release(0)
    out = llama.forward(ids[:, :4], torch.arange(4)[None], cache)
    torch.testing.assert_close(out.logits, full_logits(llama, ids)[:, :4], **CLOSE)


def test_taps(target):
    ids = tokens(2, 9)
    with torch.inference_mode():
        states = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        before_norm = []
        handle = target.layers[-1].register_forward_hook(lambda m, a, o: before_norm.append(o))
        target.model(ids, use_cache=False)
        handle.remove()
    positions = torch.arange(9).expand(2, -1)

    def hooks():
        return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in target.layers]

    others = hooks()  # transformers' own
    for taps in ([2, -1, 0], [3], [2, -1, 0]):
        target.set_taps(taps)
        target.set_taps(taps)
        assert target.tap_layer_ids == tuple(taps)
        features = target.forward(ids, positions, target.new_cache(2, 16), last_only=True).features
        wanted = [before_norm[0] if i == 3 else states[i + 1] for i in taps]
        torch.testing.assert_close(features, torch.cat(wanted, -1), **CLOSE)
    target.set_taps([])
    assert target.forward(ids, positions, target.new_cache(2, 16)).features is None
    assert hooks() == others
    with pytest.raises(ValueError, match=r"layer_ids=\[4\], expected each in -1..3"):
        target.set_taps([4])
    with pytest.raises(ValueError, match=r"layer_ids=\[1, 1\], expected distinct"):
        target.set_taps([1, 1])


def test_last_only_and_head_and_embed(llama):
    ids = tokens(2, 9)
    llama.set_taps([-1])
    positions = torch.arange(9).expand(2, -1)
    out = llama.forward(ids, positions, llama.new_cache(2, 16))
    last = llama.forward(ids, positions, llama.new_cache(2, 16), last_only=True)
    assert last.logits.shape == (2, 1, llama.vocab_size)
    torch.testing.assert_close(last.logits, out.logits[:, -1:], **CLOSE)
    assert torch.equal(llama.embed(ids), out.features)
    hidden = torch.randn(2, llama.hidden_size, requires_grad=True)
    llama.head(hidden).sum().backward()  # gradients pass
    assert hidden.grad is not None
    torch.testing.assert_close(llama.head(hidden), hidden @ llama.model.lm_head.weight.T, **CLOSE)


def test_what_a_target_says(llama, folders):
    assert (llama.vocab_size, llama.hidden_size, llama.num_layers, llama.max_position) == (320, 32, 4, 1024)
    assert llama.eos_token_ids == {258}
    assert llama.dtype == torch.float32
    assert llama.revision is None
    assert llama.sha256 == sha256_of(folders() / "model.safetensors")
    assert not llama.model.training
    assert not any(p.requires_grad for p in llama.model.parameters())
    ids = llama.render_chat([{"role": "user", "content": "hé"}])
    text = llama.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert llama.decode(llama.encode("naïve w3\n")) == "naïve w3\n"


def test_small_vocabulary_and_no_tokenizer(tmp_path):
    target = load_target(write_tiny_target(tmp_path / "a", vocab_size=31), device="cpu")
    assert target.eos_token_ids == {3}
    assert target.decode(target.encode("w5 w30")) == "w5 w30"
    bare = load_target(write_tiny_target(tmp_path / "b", vocab_size=31, tokenizer=False), device="cpu")
    assert bare.tokenizer is None
    with pytest.raises(CheckpointError, match=r"no tokenizer files.*for encode"):
        bare.encode("x")
    target.tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="chat_template=None"):
        target.render_chat([])


def test_load_weights(llama):
    ids, positions = tokens(1, 5), torch.arange(5)[None]
    before = llama.forward(ids, positions, llama.new_cache(1, 8)).logits
    key = "model.layers.0.mlp.up_proj.weight"
    new = torch.randn(llama.model.state_dict()[key].shape)
    with pytest.raises(CheckpointError, match="nope: unexpected tensor"):
        llama.load_weights({key: new, "nope": new})
    with pytest.raises(CheckpointError, match=r"up_proj.weight: shape \[2, 2\], expected \[64, 32\]"):
        llama.load_weights({key: new[:2, :2]})
    with pytest.raises(CheckpointError, match=r"up_proj.weight: dtype torch.int8, expected a floating one"):
        llama.load_weights({key: new.to(torch.int8)})
    assert torch.equal(llama.forward(ids, positions, llama.new_cache(1, 8)).logits, before)
    llama.load_weights({key: new})
    after = llama.forward(ids, positions, llama.new_cache(1, 8)).logits
    torch.testing.assert_close(after, full_logits(llama, ids), **CLOSE)
    assert not torch.allclose(after, before)
    assert llama.num_weight_updates == 1


def test_tied_head(tmp_path):
    target = load_target(write_tiny_target(tmp_path, tie=True), device="cpu")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert target.model.lm_head.weight.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()


def test_bfloat16(folders):
    target = load_target(folders(), device="cpu", dtype="bfloat16")
    ids = tokens(2, 9)
    out = target.forward(ids, torch.arange(9).expand(2, -1), target.new_cache(2, 16))
    assert out.logits.dtype == torch.bfloat16
    torch.testing.assert_close(out.logits, full_logits(target, ids), atol=0.2, rtol=0.1)


def test_packed_attention_is_attention():
    g = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 5, 8, generator=g), torch.randn(2, 3, 40, 8, generator=g)
    mask = (torch.arange(40) <= at([9, 30], 5)[:, None, :, None]).contiguous()
    repeated = key.repeat_interleave(2, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, repeated, repeated, attn_mask=mask)
    torch.testing.assert_close(packed_sdpa(query, key, key, mask), expected.transpose(1, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(tmp_path):
    with pytest.raises(ValueError, match="device='cuda', expected 'auto' or 'cpu': torch sees no CUDA device here"):
        load_target(write_tiny_target(tmp_path), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("width", [1, 5])
def test_ragged_rows_on_cuda(arch, width, folders):
    """float32 on the GPU against a cache-less forward on the CPU, without synchronising."""
    target = load_target(folders(arch), device="cuda", dtype="float32")
    ids, lengths = tokens(3, 60), [5, 17, 33]
    cache = target.new_cache(3, 64)
    cache.reserve()
    prefill(target, cache, ids.cuda(), lengths)
    block, positions = ids.gather(1, at(lengths, width)).cuda(), at(lengths, width).cuda()
    target.forward(block, positions, cache, kv_length=40)
    torch.cuda.set_sync_debug_mode("error" if arch != "qwen3_moe" else "default")
    try:
        logits = target.forward(block, positions, cache, kv_length=40).logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    full = full_logits(load_target(folders(arch), device="cpu"), ids)
    expected = torch.stack([full[r, n : n + width] for r, n in enumerate(lengths)])
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "warp"}, "device='warp', expected"),
        ({"dtype": "int3"}, "dtype='int3', expected"),
    ],
)
def test_bad_arguments(folders, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_target(folders(), **arguments)


def test_bad_forwards(llama):
    cache = llama.new_cache(1, 8)
    ids = tokens(1, 3)
    for call, message in [
        (lambda: llama.forward(ids[0], torch.arange(3), cache), "token_ids=torch.int64 [3], expected"),
        (lambda: llama.forward(ids, torch.arange(2)[None], cache), "positions=[1, 2], expected [1, 3]"),
        (
            lambda: llama.forward(ids, torch.arange(6, 9)[None], cache),
            "kv_length=9, expected at most max_length=8",
        ),
    ]:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
            call()
        assert message in str(error.value)


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refused(folder):
    with pytest.raises(CheckpointError) as error:
        load_target(folder, device="cpu")
    return str(error.value)


@pytest.fixture
def spoiled(folders, tmp_path):
    """A copy of a tiny checkpoint, to be damaged."""

    def copy(arch="llama"):
        return shutil.copytree(folders(arch), tmp_path / arch)

    return copy


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("llama", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map=['AutoModelForCausalLM']"),
        ("llama", {"model_type": "nonesuch"}, "config not understood"),
        ("mistral", {"sliding_window": 16}, "sliding_window=16, expected None"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2,
                   "layer_types": ["full_attention", "sliding_attention"] * 2},
         "layer_types has sliding_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
         "rope_type='dynamic'"),
    ],
)  # fmt: skip
def test_refused_configs(spoiled, arch, changes, message):
    folder = spoiled(arch)
    edit_config(folder, **changes)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5"}, "is_encoder_decoder=True"),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention"], "num_hidden_layers": 1},
            "attention sinks",
        ),
        ({"model_type": "qwen3_next"}, "layer_types has linear_attention"),
        ({"model_type": "gemma3"}, "multimodal isn't supported"),
    ],
)
def test_refused_architectures(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert message in refused(tmp_path)


def test_refused_attention_of_its_own(tmp_path):
    """An architecture whose code never asks transformers for the attention function."""
    shape = {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **shape)).save_pretrained(tmp_path)
    assert "attention" in refused(tmp_path)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
         "missing tensors model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.pop("lm_head.weight"), "missing tensors lm_head.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected tensors extra"),
        (lambda t: t["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")), "logits of one token are NaN"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}),
         "model.norm.weight has shape [5], expected [32]"),
    ],
)  # fmt: skip
def test_refused_tensors(spoiled, change, message):
    folder = spoiled()
    change_tensors(folder, change)
    assert message in refused(folder)


def test_refused_files(spoiled, tmp_path):
    folder = spoiled()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "weights only as pytorch_model.bin, expected safetensors or GGUF" in refused(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no weights, expected model.safetensors" in refused(folder)
    for name in ("a.gguf", "b.gguf"):
        (folder / name).touch()
    assert "2 GGUF files (a.gguf, b.gguf), expected one" in refused(folder)
    assert "no such file or folder" in refused(tmp_path / "absent")
    assert "a .json file, expected a .gguf file or a folder" in refused(folder / "config.json")


def test_gguf_needs_its_packages(spoiled, monkeypatch):
    import importlib.util

    folder = spoiled()
    (folder / "model.safetensors").rename(folder / "x.gguf")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else found(name, *a))
    assert "missing gguf: pip install specmask[demo]" in refused(folder)


def shard(folder, names=("one.safetensors", "two.safetensors"), **changes):
    """Splits model.safetensors in two, named as asked, with an index; `changes` go into the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {key: names[i % 2] for i, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({k: tensors[k] for k, n in weight_map.items() if n == name}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_of_any_name(spoiled, folders):
    folder = shard(spoiled())
    target = load_target(folder, device="cpu")
    ids = tokens(1, 5)
    assert torch.equal(full_logits(target, ids), full_logits(load_target(folders(), device="cpu"), ids))
    listing = "".join(f"{sha256_of(folder / n)}  {n}\n" for n in ("one.safetensors", "two.safetensors"))
    assert target.sha256 == hashlib.sha256(listing.encode()).hexdigest()


class Trap:
    """Unpickling it raises."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle of the checkpoint was loaded')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../two.safetensors", "/two.safetensors", "a\\b.safetensors", 3])
@pytest.mark.parametrize("keep_single", [False, True])
def test_refused_index_files(spoiled, name, keep_single):
    """Nothing but safetensors files of the folder, even where transformers would read the single file."""
    folder = spoiled()
    if keep_single:
        shutil.copy(folder / "model.safetensors", folder / "kept")
    shard(folder, weight_map={"lm_head.weight": "one.safetensors", "model.norm.weight": name})
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    if keep_single:
        (folder / "kept").rename(folder / "model.safetensors")
    message = refused(folder)
    assert f"model.safetensors.index.json: weight_map has {name!r} for model.norm.weight, expected" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "model.safetensors.index.json holds [], expected a JSON object"),
        ('{"weight_map": ["x"]}', "weight_map=['x'], expected an object"),
        ('{"weight_map": {}}', "weight_map={}, expected an object"),
        ('{"metadata": {}}', "weight_map=None, expected an object"),
        ('{"weight_map"', "model.safetensors.index.json is no JSON"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "gone.safetensors is in the index but not there"),
    ],
)
def test_refused_indexes(spoiled, text, message):
    folder = shard(spoiled())
    (folder / "model.safetensors.index.json").write_text(text)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"null", "config.json holds None, expected a JSON object"),
        (b"5", "config.json holds 5, expected a JSON object"),
        (b"[1]", "config.json holds [1], expected a JSON object"),
        (b'{"model_type": "lla', "config.json is no JSON"),
        (b'{"model_type": "\xff\xfe"}', "config.json is no JSON in UTF-8"),
        (b"[" * 100_000, "config.json is no JSON"),
        (b"", "config.json is no JSON"),
        (b"{}", "config not understood"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refused_config_files(spoiled, content, message):
    folder = spoiled()
    (folder / "config.json").write_bytes(content)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": None}, "auto_map=None, expected no such key"),
        ({"auto_map": 3}, "auto_map=3, expected no such key"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config={'quant_method': 'gptq'"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantised weights aren't supported"),
        ({"quantization_config": {}}, "quantization_config={}, expected none"),
        ({"transformers_weights": "adapter_model.bin"}, "transformers_weights='adapter_model.bin', expected none"),
        ({"model_type": ["llama"]}, "config not understood"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": -32}, "not loadable"),
        ({"num_attention_heads": 5}, "hidden size (32) is not a multiple"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_hidden_layers": 0}, "unexpected tensors"),
        ({"num_key_value_heads": 3}, "has shape [16, 32], expected [24, 32]"),
        ({"hidden_act": "nonesuch"}, "nonesuch"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_parameters": "yarn"}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1e4}}, "nonesuch"),
        ({"layer_types": 5}, "layer_types=5, expected a list of names"),
        ({"layer_types": [["full_attention"]]}, "layer_types=[['full_attention']], expected a list of names"),
        ({"rms_norm_eps": float("nan")}, "logits of one token are NaN in torch.float32"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "NaN"),
        ({"dtype": "nonesuch"}, "nonesuch"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
    ids=str,
)
def test_refused_config_values(spoiled, changes, message):
    folder = spoiled()
    (folder / "generation_config.json").unlink()
    edit_config(folder, **changes)
    assert message in refused(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:1000],
        lambda data: data[:-7],
        lambda data: struct.pack("<Q", 2**40) + data[8:],
        lambda data: pickle.dumps(Trap()),
        lambda data: data[:8] + b"\xff" * 50 + data[58:],
    ],
    ids=["empty", "short", "in the header", "in the data", "huge header", "a pickle", "no UTF-8"],
)
def test_refused_safetensors(spoiled, damage):
    folder = spoiled()
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path} can't be read as safetensors: SafetensorError" in refused(folder)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.int64, "I64"),
     (torch.float8_e4m3fn, "F8_E4M3")],
)  # fmt: skip
@pytest.mark.parametrize("sharded", [False, True])
def test_refused_dtypes(spoiled, dtype, name, sharded):
    folder = spoiled()
    key = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda t: t.update({key: t[key].to(dtype)}))
    if sharded:
        shard(folder)
    assert f"safetensors: tensor {key} has dtype {name}, expected one of F64, F32, F16, BF16" in refused(folder)


def test_masks_of_older_checkpoints_are_skipped(tmp_path):
    """Their integer tensors are not weights: GPT-NeoX's and GPT-2's first checkpoints have them."""
    shape = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gpt_neox", **shape, intermediate_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}
    change_tensors(tmp_path, lambda t: t.update(mask))
    assert load_target(tmp_path, device="cpu").num_layers == 1
    bias = "gpt_neox.layers.0.attention.dense.bias"
    change_tensors(tmp_path, lambda t: t.update({bias: t[bias].to(torch.int8)}))
    assert f"tensor {bias} has dtype I8" in refused(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer not loadable"),
        ("tokenizer.json", b"\xff", "tokenizer not loadable"),
        ("tokenizer_config.json", b"[]", "tokenizer not loadable"),
        ("adapter_config.json", b"{}", "adapter_config.json: an adapter's file, expected none"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id='x', expected an integer"),
    ],
)
def test_refused_side_files(spoiled, file, content, message):
    folder = spoiled()
    (folder / file).write_bytes(content)
    assert message in refused(folder)


def test_refused_gguf(spoiled):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    folder = spoiled()
    (folder / "x.gguf").write_bytes(b"GGUF no more")
    assert "version=544173600, expected 2 or 3" in refused(folder / "x.gguf")


def test_whatever_fails_is_a_checkpoint_error(folders, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("why not")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("model_loaders.targets.target.probe", fail)
    assert "llama" in (message := refused(folders()))
    assert "not usable as a target: ZeroDivisionError: why not" in message
    monkeypatch.setattr("model_loaders.targets.target.probe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_target(folders(), device="cpu")


def test_a_path_is_stored_as_text(llama, folders):
    assert json.dumps(llama.name) == json.dumps(str(folders()))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(folders, tmp_path, monkeypatch):
    """The snapshot of "someone/tiny" in a hub cache of its own, read offline."""
    repo = tmp_path / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return shutil.copytree(folders(), repo / "snapshots" / COMMIT)


def test_hub(hub, folders):
    target = load_target("someone/tiny", device="cpu")
    assert (target.name, target.revision) == ("someone/tiny", COMMIT)
    assert target.sha256 == sha256_of(folders() / "model.safetensors")
    assert target.eos_token_ids == {258}
    assert target.tokenizer is not None
    shard(hub)
    assert load_target("someone/tiny", device="cpu").sha256 is not None


def test_refused_on_the_hub(hub):
    weight_map = {"lm_head.weight": "pytorch_model.bin"}
    shard(hub, weight_map=weight_map)
    (hub / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "weight_map has 'pytorch_model.bin' for lm_head.weight" in refused("someone/tiny")
    (hub / "model.safetensors.index.json").unlink()
    assert "no weights, expected model.safetensors" in refused("someone/tiny")
    save_file({"lm_head.weight": torch.zeros(320, 32, dtype=torch.int8)}, hub / "model.safetensors")
    assert "tensor lm_head.weight has dtype I8" in refused("someone/tiny")
    assert "not readable from the hub" in refused("someone/absent")
