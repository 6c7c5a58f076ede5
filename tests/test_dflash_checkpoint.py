"""DFlash checkpoints: a round trip, the names and keys that occur in public ones, and everything refused."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_loaders.drafts import checkpoint as draft_checkpoint
from model_loaders.drafts.backbone import SLIDING
from model_loaders.drafts.checkpoint import load_draft, save_draft
from model_loaders.drafts.finding import DEMO_DRAFTS, find_draft
from model_loaders.drafts.formats.zlab import default_layer_ids
from model_loaders.errors import CheckpointError
from tests.test_dflash import MASK, VOCAB, make_draft


@pytest.fixture
def target():
    return SimpleNamespace(
        hidden_size=24, num_layers=5, vocab_size=VOCAB, device=torch.device("cpu"), dtype=torch.float32,
        tokenizer=SimpleNamespace(get_vocab=lambda: {"<mask>": MASK}),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    save_draft(tmp_path, make_draft())
    return tmp_path


def edit(folder, change):
    """Rewrite config.json through change(config)."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    "kind",
    [{}, {"layer_types": (SLIDING, SLIDING), "sliding_window": 7, "causal": False}, {"attention_bias": True},
     {"rope": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4, "original_max_position_embeddings": 64}},
     {"vocab_size": VOCAB}],
)  # fmt: skip
def test_round_trip(tmp_path, target, kind):
    draft = make_draft(**kind)
    save_draft(tmp_path, draft)
    found = load_draft(str(tmp_path), target)
    assert found.config == draft.config
    assert (found.name, found.revision) == (str(tmp_path), None)
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], tensor)
    assert found.sha256 == load_draft(str(tmp_path), target).sha256
    assert not any(p.requires_grad for p in found.module.parameters())


def test_stored_in_another_dtype(tmp_path, target):
    save_draft(tmp_path, make_draft(), dtype=torch.bfloat16)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert load_draft(str(tmp_path), target).dtype == torch.float32


def test_prefix_fused_projections_and_shards(folder, target):
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        parts = [tensors.pop(f"{attention}.{p}_proj.weight") for p in "qkv"]
        tensors[f"{attention}.qkv_proj.weight"] = torch.cat(parts)
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    save_file({n: tensors[n] for n in names[::2]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    found = load_draft(str(folder), target).module.state_dict()
    for name, tensor in make_draft().module.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_keys_at_the_top_level(folder, target):
    def flatten(config):
        config |= config.pop("dflash_config")
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "type": "default"}
        config["is_causal"] = True

    edit(folder, flatten)
    config = load_draft(str(folder), target).config
    assert config.target_layer_ids == (0, 2, 3)
    assert config.mask_token_id == MASK
    assert config.rope["rope_theta"] == 10000.0
    assert config.causal is True


def test_nested_keys_win(folder, target):
    edit(folder, lambda c: c.update(block_size=9) or c["dflash_config"].update(block_size=5))
    assert load_draft(str(folder), target).block_size == 5


def test_mask_token_by_name(folder, target):
    edit(
        folder,
        lambda c: c["dflash_config"].pop("mask_token_id") and c["dflash_config"].update(mask_token="<mask>"),
    )
    assert load_draft(str(folder), target).mask_token_id == MASK


def test_default_layer_ids():
    assert default_layer_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(5, 32) == (1, 8, 15, 22, 29)
    assert default_layer_ids(8, 40) == (1, 6, 11, 16, 22, 27, 32, 37)
    assert default_layer_ids(1, 36) == (18,)


def test_guessed_layer_ids_warn(folder, target):
    edit(folder, lambda c: c["dflash_config"].pop("target_layer_ids"))
    edit_tensors(folder, lambda t: t.update({"fc.weight": torch.zeros(24, 48)}))
    with pytest.warns(UserWarning, match=r"names no target_layer_ids; using \[1, 2\]"):
        assert load_draft(str(folder), target).target_layer_ids == (1, 2)


def test_unknown_nested_key_warns(folder, target):
    edit(folder, lambda c: c["dflash_config"].update(shiny=3))
    with pytest.warns(UserWarning, match=r"dflash_config.shiny=3"):
        load_draft(str(folder), target)


CONFIGS = [
    (lambda c: c.update(hidden_size=32), "hidden_size=32, but the target has 24"),
    (lambda c: c.update(num_target_layers=7), "num_target_layers=7, but the target has 5"),
    (lambda c: c.update(vocab_size=99), f"vocab_size=99, but the target has {VOCAB}"),
    (lambda c: c["dflash_config"].update(mask_token_id=VOCAB), f"mask_token_id={VOCAB}, expected .* {VOCAB}"),
    (
        lambda c: c["dflash_config"].update(target_layer_ids=[0, 4]),
        r"target_layer_ids=\[0, 4\], expected .* 3",
    ),
    (lambda c: c["dflash_config"].update(target_layer_ids=[-2, 1]), r"target_layer_ids=\[-2, 1\]"),
    (lambda c: c["dflash_config"].update(conv_kernel_size=2), "dflash_config.conv_kernel_size=2.*implement"),
    (lambda c: c.update(output_multiplier=-0.5), "output_multiplier=-0.5, expected a positive number"),
    (lambda c: c.update(attention_sink_bias=True), "attention_sink_bias=True, expected False"),
    (lambda c: c.update(final_logit_softcapping="x"), "final_logit_softcapping='x', expected a positive number"),
    (lambda c: c.update(attention_value_scale=2.0), "attention_value_scale=2.0"),
    (lambda c: c.update(markov_rank=256), "markov_rank=256"),
    (
        lambda c: c.update(architectures=["DFlash2DraftModel"]),
        "conv_kernel_size=missing, selector_rank=missing, expected one of them for DFlash2DraftModel",
    ),
    (lambda c: c.update(architectures=["Qwen3DSparkModel"]), "target_layer_ids=None, expected a list"),
    (lambda c: c.update(architectures=["Eagle3"]), r"architectures=\['Eagle3'\], expected one of DFlashDraftModel, "),
    (lambda c: c.update(speculators_model_type="dflash"), "transformer_layer_config=None, expected an object"),
    (lambda c: c.pop("rope_theta"), "rope_theta=None"),
    (
        lambda c: c.update(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_type='dynamic', expected one of",
    ),
    (lambda c: c.update(block_size=1), "block_size=1, expected an integer of at least 2"),
    (lambda c: c.pop("intermediate_size"), "intermediate_size=None"),
    (lambda c: c.update(layer_types=["full_attention"]), "layer_types has 1 entries, num_hidden_layers=2"),
    (lambda c: c.update(layer_types=["full_attention", "linear"]), r"layer_types holds \['linear'\]"),
    (lambda c: c.update(hidden_act="gelu"), "hidden_act='gelu', expected 'silu'"),
    (lambda c: c.update(dflash_config=[1]), r"dflash_config=\[1\], expected an object"),
    (lambda c: c.update(dflash_config="x"), "dflash_config='x', expected an object"),
    (
        lambda c: c.update(quantization_config={"bits": 4}),
        r"quantization_config=\{'bits': 4\}, expected none, or compr",
    ),
    (
        lambda c: c.update(quantization_config="int8"),
        "quantization_config='int8', expected none, or compressed-tensors",
    ),
    (lambda c: c.update(mlp_bias=True), "mlp_bias=True, expected False"),
    (lambda c: c.update(num_target_layers="5"), "num_target_layers='5', expected an integer"),
    (lambda c: c.update(vocab_size="61"), "vocab_size='61', expected an integer"),
    (lambda c: c.update(hidden_size=24.0), r"hidden_size=24\.0, expected an integer"),
    (lambda c: c.update(num_attention_heads=True), "num_attention_heads=True, expected an integer"),
    (lambda c: c.update(num_key_value_heads=0), "num_key_value_heads=0, expected an integer of at least 1"),
    (lambda c: c.update(use_sliding_window="no", layer_types=None), "use_sliding_window='no', expected true"),
    (
        lambda c: c.update(use_sliding_window=True, sliding_window=4, layer_types=None, max_window_layers="x"),
        "max_window_layers='x', expected an integer of at least 0",
    ),
    (
        lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window="4"),
        "sliding_window='4', expected an integer",
    ),
    (lambda c: c.update(num_hidden_layers=10**15, layer_types=None), "num_hidden_layers=1000000000000000, expected at"),
    (lambda c: c.update(intermediate_size=10**15), "weights, expected about the"),
    (lambda c: c.update(intermediate_size=10**25), "config.json: no draft can be made by it: "),
]


def config_values(key, values, expected, place=None):
    """Cases of CONFIGS: each value of the key (of dflash_config, or of another object `place`) is refused."""
    for value in values:

        def change(config, value=value):
            (config if place is None else config[place])[key] = value

        yield change, f"{re.escape(f'{key}={value!r}')}.*{expected}"


def rope_values(key, values, expected, **rope):
    """Cases of CONFIGS: each value of the scaling's key is refused beside the given others."""
    for value in values:

        def change(config, value=value):
            config["rope_scaling"] = {"factor": 2.0, **rope, key: value}

        yield change, f"{re.escape(f'{key}={value!r}')}.*{expected}"


NAN, INF = float("nan"), float("inf")
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS += [
    *config_values("target_layer_ids", [[0, 0]], "expected distinct", "dflash_config"),
    *config_values("target_layer_ids", [5, "02", {"0": 1}], "expected a list", "dflash_config"),
    *config_values("target_layer_ids", [[], ["0"], [[0]], [True], [0.0]], "expected layers", "dflash_config"),
    *config_values("mask_token_id", ["1", 1.0, True, -1], "expected an id", "dflash_config"),
    *config_values("causal", ["false", 0, []], "expected true, false or null", "dflash_config"),
    *config_values("is_causal", ["no", 1], "expected true, false or null"),
    *config_values("attention_bias", ["false", 1], "expected true, false or null"),
    *config_values("layer_types", [5, "full_attention", [["full_attention"]] * 2, {}], "expected a list"),
    *config_values("head_dim", ["8", 8.0, -8, 0, True], "expected an integer of at least 1"),
    *config_values("head_dim", [7], "expected an even integer"),
    *config_values("rms_norm_eps", ["a", None, NAN, INF, 0, -1e-6, True], "expected a positive number"),
    *config_values("max_position_embeddings", ["x", 0, 4.5], "expected an integer"),
    *config_values("rope_theta", [NAN, INF, 0, -1.0, True, "x", [1]], "expected a positive number"),
    *config_values("rope_scaling", ["yarn", 5, ["yarn"]], "expected an object"),
    *config_values("rope_parameters", ["yarn", True], "expected an object"),
    *rope_values("factor", ["2", 0, -1.0, NAN, True], "expected a positive number", rope_type="linear"),
    *rope_values("factor", ["2", 0], "expected a positive number", rope_type="yarn"),
    *rope_values("beta_fast", ["x", -1], "expected a positive number", rope_type="yarn"),
    *rope_values("attention_factor", ["x", NAN], "expected a positive number", rope_type="yarn"),
    *rope_values("mscale", ["x", -1], "expected a positive number", rope_type="yarn"),
    *rope_values("truncate", ["no"], "expected true", rope_type="yarn"),
    *rope_values("original_max_position_embeddings", ["x", 0, 4.5], "expected an integer", rope_type="yarn"),
    *rope_values("rope_type", [["yarn"], 5], "expected one of"),
    *rope_values("low_freq_factor", ["x", 0], "expected a positive number", **LLAMA3),
    *rope_values("high_freq_factor", [0.5, 1.0], "expected more than low_freq_factor=1.0", **LLAMA3),
    *[
        (
            lambda c, key=key: c.update(rope_scaling={"factor": 2.0, **LLAMA3, key: None}),
            f"rope_type='llama3' without a {key}; add rope_scaling.{key}",
        )
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    ],
]


@pytest.mark.parametrize(("change", "message"), CONFIGS)
def test_refused_configs(folder, target, change, message):
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(str(folder), target)


def change_group(change):
    return lambda config: change(config["quantization_config"]["config_groups"]["group_0"])


INT8_CONFIGS = [
    (lambda c: c["quantization_config"].update(format="pack-quantized"), "format int-quantized"),
    (change_group(lambda group: group["weights"].update(num_bits=4)), "expected none, or compressed-tensors"),
    (change_group(lambda group: group["weights"].update(symmetric=False)), "a symmetric scale a channel"),
    (change_group(lambda group: group.update(input_activations={"num_bits": 8})), "plain activations"),
    (lambda c: c["quantization_config"].update(config_groups=[]), "expected none, or compressed-tensors"),
    (lambda c: c.pop("quantization_config"), "has dtype I8, expected one of F64"),
]
INT8_TENSORS = [
    (lambda t: t.pop("fc.weight_scale"), "tensor fc.weight is int8 without fc.weight_scale"),
    (lambda t: t.update({"fc.weight_scale": torch.ones(24)}), r"fc.weight_scale has shape \[24\], expected \[24, 1\]"),
    (lambda t: t.update({"fc.weight": torch.zeros(24, 72)}), "fc.weight_scale scales one of dtype torch.float32"),
    (lambda t: t.update({"other.weight_scale": torch.ones(24, 1)}), "no place for: other.weight_scale"),
    (lambda t: t["fc.weight_scale"][3].fill_(NAN), "tensor fc.weight has NaN or infinite values"),
    (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int64)}), "has dtype I64"),
]


def test_int8_round_trip(tmp_path, target):
    """Half a step of each row's scale away at most; written again it is the same file."""
    draft = make_draft()
    with torch.no_grad():
        draft.module.fc.weight[2] = 0
    save_draft(tmp_path / "a", draft, int8=True)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8
    assert stored["norm.weight"].dtype == torch.float32
    found = load_draft(str(tmp_path / "a"), target)
    assert found.config == draft.config
    for name, tensor in draft.module.state_dict().items():
        half = stored[f"{name}_scale"] / 2 * (1 + 1e-5) if tensor.ndim == 2 else torch.zeros(())
        assert ((found.module.state_dict()[name] - tensor).abs() <= half).all(), name
    save_draft(tmp_path / "b", found, int8=True)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("change", "message"), INT8_CONFIGS)
def test_refused_int8_configs(tmp_path, target, change, message):
    save_draft(tmp_path, make_draft(), int8=True)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(str(tmp_path), target)


@pytest.mark.parametrize(("change", "message"), INT8_TENSORS)
def test_refused_int8_tensors(tmp_path, target, change, message):
    save_draft(tmp_path, make_draft(), int8=True)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(str(tmp_path), target)


TENSORS = [
    (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), "missing .*layers.1.self_attn.q_norm.weight"),
    (lambda t: t.update({"embed_tokens.weight": torch.zeros(2, 2)}), "no place for: embed_tokens.weight"),
    (
        lambda t: t.update({"fc.weight": torch.zeros(24, 48)}),
        r"fc.weight has shape \[24, 48\], expected \[24, 72\]",
    ),
    (lambda t: t.update({"model.fc.weight": torch.zeros(24, 72)}), "fc.weight occurs twice"),
    (
        lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": torch.zeros(7, 24)}),
        "has 7 rows, expected 80",
    ),
    (lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": torch.tensor(1.0)}), "has 0 rows, expected 80"),
    (
        lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": torch.zeros(80, 24)}),
        "q_proj.weight occurs twice, also as a part of layers.0.self_attn.qkv_proj.weight",
    ),
    (lambda t: t["norm.weight"][3:4].fill_(NAN), "tensor norm.weight has NaN or infinite values as torch.float32"),
    (lambda t: t["fc.weight"][0, :1].fill_(INF), "tensor fc.weight has NaN or infinite values"),
    (
        lambda t: t.update({"norm.weight": torch.full((24,), 1e300, dtype=torch.float64)}),
        "tensor norm.weight has NaN or infinite values as torch.float32",
    ),
    *[
        (
            lambda t, dtype=dtype: t.update({"norm.weight": t["norm.weight"].to(dtype)}),
            f"model.safetensors: tensor norm.weight has dtype {name}, expected one of F64, F32, F16, BF16",
        )
        for dtype, name in [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.bool, "BOOL"), (torch.int64, "I64")]
    ],
]


@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_refused_tensors(folder, target, change, message):
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(str(folder), target)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"null", "config.json holds None, expected a JSON object"),
        (b"5", "config.json holds 5, expected a JSON object"),
        (b"[]", r"config.json holds \[\], expected a JSON object"),
        (b'{"a": "\xff"}', "config.json is no JSON in UTF-8"),
    ],
)
def test_refused_config_files(folder, target, content, message):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, target)


@pytest.mark.parametrize("keep", [0, 5, 100, -3])
def test_refused_safetensors(folder, target, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors can't be read as safetensors: SafetensorError"):
        load_draft(folder, target)


def test_scalings_load(folder, target):
    for rope in (
        {"factor": 2.0, **LLAMA3},
        {"type": "linear", "factor": 2},
        {"type": "yarn", "factor": 4, "mscale": 0},
    ):
        edit(folder, lambda c, rope=rope: c.update(rope_scaling=rope))
        assert load_draft(folder, target).config.rope["factor"] == rope["factor"]


def test_frequencies_stay_exact(folder, target):
    """In a bfloat16 draft as in a bfloat16 target of transformers."""
    target.dtype = torch.bfloat16
    draft = load_draft(folder, target)
    assert draft.dtype == torch.bfloat16
    assert torch.equal(draft.module.rope.inv_freq, make_draft().module.rope.inv_freq)


def test_a_path_is_stored_as_text(folder, target):
    assert json.dumps(load_draft(folder, target).name) == json.dumps(str(folder))


def test_whatever_fails_is_a_checkpoint_error(folder, target, monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError("why not")

    monkeypatch.setattr(draft_checkpoint, "_place", fail)
    with pytest.raises(CheckpointError, match="not usable as a draft: ZeroDivisionError: why not"):
        load_draft(folder, target)


def test_refused_places(tmp_path):
    """Found without a target."""
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        find_draft(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_draft(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no JSON"):
        find_draft(tmp_path)
    save_draft(tmp_path, make_draft())
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model.safetensors': a file, expected the folder of config.json"):
        find_draft(file)
    file.write_bytes(b"not a file of tensors")
    with pytest.raises(CheckpointError, match="can't be read"):
        find_draft(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        find_draft(tmp_path)
    edit(tmp_path, lambda config: config.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(CheckpointError, match=r"architectures=\['LlamaForCausalLM'\], expected one of"):
        find_draft(tmp_path)


def test_hub_names(folder, target, monkeypatch):
    """config.json is asked for first, then the safetensors of the same commit, which is the revision."""
    asked = []

    def snapshot_download(name, **options):
        asked.append(options | {"name": name})
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = find_draft("someone/some-draft", revision="v1")
    first = {"name": "someone/some-draft", "revision": "v1", "allow_patterns": ["config.json"]}
    assert asked == [first]
    draft = load_draft(found, target)
    assert asked == [first, first | {"revision": folder.name, "allow_patterns": ["*.safetensors"]}]
    assert (draft.name, draft.revision) == ("someone/some-draft", folder.name)
    draft = load_draft("someone/some-draft", target, revision="v1")
    assert asked[2:] == asked[:2]
    assert (draft.name, draft.revision) == ("someone/some-draft", folder.name)


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    """One line, whatever the hub says, with the shipped draft that was meant."""

    def snapshot_download(name, **_):
        raise OSError(f"{name}:\nnot here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as raised:
        find_draft("demo_dflash2")
    said = str(raised.value)
    assert "\n" not in said
    assert "(demo_dflash2: not here)" in said
    assert said.endswith("did you mean 'demo-dflash2'?")


@pytest.mark.parametrize(
    ("name", "method", "rows"), [("demo", "dspark", 7), ("demo-dflash", "dflash", 8), ("demo-dflash2", "dflash2", 8)]
)
def test_the_shipped_demo_drafts_are_the_cards(name, method, rows):
    """It loads for a target of the demo's size, is the file that the card names, and is small enough to ship."""
    target = SimpleNamespace(
        hidden_size=576, num_layers=30, vocab_size=49152, device=torch.device("cpu"), dtype=torch.float32
    )
    draft = load_draft(name, target)
    assert (draft.method, draft.num_drafts, draft.block_size) == (method, 7, rows)
    assert draft.target_layer_ids == (1, 7, 14, 20, 27)
    card = (DEMO_DRAFTS[name] / "README.md").read_text(encoding="utf-8")
    assert draft.sha256 in card
    assert sum(path.stat().st_size for path in draft.files) < 20_000_000
