"""Targets: ragged rows against a cache-less forward, batch independence, taps, and every refusal."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from model_loaders.attention import packed_sdpa
from model_loaders.errors import CheckpointError
from model_loaders.packed_linear import PackedLinear
from model_loaders.target import load_target, sha256_of
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
    torch.testing.assert_close(packed_sdpa(query, key, key, mask), expected)


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
