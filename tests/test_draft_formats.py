"""Layouts of draft checkpoints: what each says, and every contradiction refused by key and value."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_loaders import CheckpointError, load_draft
from model_loaders.drafts.dflash import DFlashDraft
from model_loaders.drafts.dflash2 import DFlash2Draft
from model_loaders.drafts.dspark import DSparkDraft
from tests import tiny_drafts
from tests.test_drafts import BLOCK, LAYERS, MASK, TAPS, VOCAB, WIDTH, fake_target, load


def edit(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


METHODS = {"dflash": DFlashDraft, "dflash2": DFlash2Draft, "dspark": DSparkDraft}


@pytest.mark.parametrize("kind", tiny_drafts.KINDS)
def test_the_method_and_its_figures(tmp_path, kind):
    draft = load(tmp_path, kind)
    word = next(method for method in ("dflash2", "dflash", "dspark", "specforge") if method in kind)
    method = "dspark" if word == "specforge" else word
    assert type(draft) is METHODS[method]
    assert draft.method == method
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (BLOCK, MASK, TAPS)
    assert draft.draws_by_default
    assert len(draft.sha256) == 64


def test_default_by_type_of_sampling_from_the_anchor(tmp_path):
    """speculators: DSpark does, DFlash doesn't, and either may say otherwise."""
    for kind, default in (("speculators dflash", BLOCK - 1), ("speculators dspark", BLOCK)):
        draft = load(tmp_path / kind, kind)
        assert draft.num_drafts == default
        edit(tmp_path / kind, lambda c, other=default == BLOCK - 1: c.update(sample_from_anchor=other))
        assert load_draft(tmp_path / kind, draft.target).num_drafts == 2 * BLOCK - 1 - default


def test_a_count_of_drafts_that_tells_another_story(tmp_path):
    """A checkpoint that doesn't say whether it samples from the anchor, but how many tokens it proposes."""
    target = load(tmp_path, "speculators dspark").target
    for count in (BLOCK, BLOCK - 1):
        edit(tmp_path, lambda c, n=count: c["speculators_config"].update(proposal_methods=[{"speculative_tokens": n}]))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            load_draft(tmp_path, target)
        told = [str(w.message) for w in seen if "speculative_tokens" in str(w.message)]
        assert len(told) == (count != BLOCK)
        assert all(f"speculative_tokens={BLOCK - 1}, but block_size={BLOCK} proposes {BLOCK} with" in t for t in told)


def test_sliding_window_non_causal(tmp_path):
    types = ["sliding_attention", "full_attention"]
    draft = load(tmp_path, "speculators dflash", layer_types=types)
    assert [draft.config.is_causal(layer) for layer in range(2)] == [True, False]
    edit(tmp_path, lambda c: c.update(sliding_window_non_causal=True))
    config = load_draft(tmp_path, draft.target).config
    assert [config.is_causal(layer) for layer in range(2)] == [False, False]
    assert [config.window(layer) for layer in range(2)] == [3, None]


def test_defaults_of_the_transformer_config(tmp_path):
    """speculators writes only what differs from Qwen3's defaults."""
    draft = load(tmp_path, "speculators dflash")

    def shorten(config):
        for key in ("rms_norm_eps", "hidden_act", "attention_bias", "layer_types", "rope_parameters"):
            del config["transformer_layer_config"][key]

    edit(tmp_path, shorten)
    assert load_draft(tmp_path, draft.target).config == draft.config


def test_dspark_config_object_and_top_level_keys(tmp_path):
    draft = load(tmp_path, "specforge")

    def rename(config):
        config["dspark_config"] = config.pop("dflash_config")
        config["markov_rank"] = config["dspark_config"].pop("markov_rank")

    edit(tmp_path, rename)
    assert load_draft(tmp_path, draft.target).config == draft.config


def test_integer_maps_of_either_width_and_tensors_of_training(tmp_path):
    draft = load(tmp_path, "speculators dflash")

    def change(tensors):
        tensors["d2t"] = tensors["d2t"].int()
        del tensors["t2d"]
        tensors["verifier_lm_head.weight"] = torch.zeros(VOCAB, WIDTH)

    edit_tensors(tmp_path, change)
    assert torch.equal(load_draft(tmp_path, draft.target).module.d2t, draft.module.d2t)


def nested(key, value):
    return lambda c: c["dflash_config"].update({key: value})


def inner(key, value):
    return lambda c: c["transformer_layer_config"].update({key: value})


def top(key, value):
    return lambda c: c.update({key: value})


def without(*names):
    def change(tensors):
        for name in names:
            del tensors[name]

    return change


W1 = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj.weight"
CONFIGS = [
    # A target of another size, layers, masks: in each layout under its own key.
    ("dspark vanilla", top("hidden_size", 24), f"hidden_size=24, but the target has {WIDTH}"),
    ("dspark vanilla", top("num_target_layers", 36), f"num_target_layers=36, but the target has {LAYERS}"),
    ("dspark vanilla", top("vocab_size", 99), f"vocab_size=99, but the target has {VOCAB}"),
    ("dspark vanilla", top("target_layer_ids", [0, 2, 4]), r"target_layer_ids=\[0, 2, 4\], expected .*-1 .* to 3 .* 5"),
    ("dspark vanilla", top("mask_token_id", VOCAB), f"mask_token_id={VOCAB}, expected an id below .* {VOCAB}"),
    ("dspark vanilla", top("block_size", 0), "block_size=0, expected an integer of at least 1"),
    ("dspark vanilla", top("block_size", 10**6), "block_size=1000000, expected at most max_position_embeddings="),
    ("specforge", nested("target_layer_ids", [0, 2, 7]), r"target_layer_ids=\[0, 2, 7\], expected layers from -1"),
    ("specforge", nested("mask_token_id", -1), "mask_token_id=-1, expected an id"),
    ("specforge", nested("projector_type", "domino"), "projector_type='domino', expected 'dspark'"),
    ("specforge", top("model_type", "deepseek_v4"), "model_type='deepseek_v4', expected 'qwen3'"),
    ("speculators dflash", top("aux_hidden_state_layer_ids", [1, 3, 5]), r"aux_.*=\[1, 3, 5\], .* from 0 .* to 4 .* 5"),
    ("speculators dflash", top("aux_hidden_state_layer_ids", None), "aux_hidden_state_layer_ids=None, expected a list"),
    ("speculators dflash", inner("vocab_size", 99), f"vocab_size=99, but the target has {VOCAB}"),
    ("speculators dflash", inner("hidden_size", 24), f"hidden_size=24, but the target has {WIDTH}"),
    ("speculators dflash", top("target_hidden_size", 24), f"target_hidden_size=24, but the target has {WIDTH}"),
    ("speculators dflash", top("mask_token_id", None), "mask_token_id=missing, expected an id"),
    ("speculators dflash", top("speculators_model_type", "eagle3"), "speculators_model_type='eagle3', expected one of"),
    ("speculators dflash", lambda c: c["speculators_config"].update(algorithm="dspark"),
     "speculators_config.algorithm='dspark', but speculators_model_type='dflash'"),
    ("speculators dflash", top("speculators_config", 5), "speculators_config=5, expected an object"),
    ("speculators dflash", top("projector_type", "domino"), "projector_type='domino', expected 'dflash'"),
    ("speculators dflash", top("draft_vocab_size", 24), f"draft_vocab_size=24, expected at most vocab_size={VOCAB}"),
    ("speculators dflash", top("draft_vocab_size", 9), r"tensor d2t is torch.int64 \[17\], expected int64 \[9\]"),
    ("speculators dflash", top("sample_from_anchor", "no"), "sample_from_anchor='no', expected true, false or null"),
    ("speculators dflash", inner("model_type", "gemma4"), "config.model_type='gemma4', expected one of"),
    ("speculators dflash", inner("rope_parameters", 5), "transformer_layer_config is no qwen3 configuration"),
    ("speculators dflash whole", top("draft_vocab_size", 9), "draft_vocab_size=9 with vocab_size=23, .* no tensor d2t"),
    # Metadata and tensors that contradict each other.
    ("dspark vanilla", top("markov_rank", 0), f"markov_rank=0, but the weights hold a tensor {W1}"),
    ("dspark vanilla", top("markov_rank", 5), r"has shape \[1, 19\], expected \[1, 21\] by config.json"),
    ("dspark rank 0", top("markov_rank", 3), f"markov_rank=3, but the weights hold no tensor {W1}"),
    ("dspark vanilla", top("markov_head_type", "gated"), "markov_head_type='gated', but .* no tensor .*gate_proj"),
    ("dspark gated", top("markov_head_type", "rnn"), "markov_head_type='rnn', but .* a tensor markov_head.gate_proj"),
    ("dspark vanilla", top("markov_head_type", "lstm"), "markov_head_type='lstm', expected one of vanilla, gated, rnn"),
    ("dspark vanilla", top("enable_confidence_head", False), f"enable_confidence_head=False, but .* {CONFIDENCE}"),
    ("dspark rank 0", top("enable_confidence_head", True), f"enable_confidence_head=True, but .* no .* {CONFIDENCE}"),
    ("dflash2", nested("selector_rank", None), "selector_rank=missing, selector_top_k=4, expected both or neither"),
    ("dflash2", nested("selector_top_k", VOCAB + 1), f"selector_top_k={VOCAB + 1}, expected at most {VOCAB} tokens"),
    ("dflash2", nested("conv_group_size", None), "conv_kernel_size=2, conv_group_size=missing, expected both"),
    ("dflash2", nested("conv_group_size", 5), "conv_group_size=5, expected a divisor of hidden_size=16"),
    (
        "dflash2",
        lambda c: c["dflash_config"].update(selector_rank=None, selector_top_k=None),
        "selector_rank=missing, but the weights hold a tensor candidate_selector.predecessor_codebook",
    ),
    ("dflash2", top("architectures", ["DFlashDraftModel"]), "conv_kernel_size=2, expected None"),
    ("dflash2", nested("markov_rank", 3), "dflash_config.markov_rank=3, expected 0"),
    ("dspark vanilla", top("architectures", ["DFlashDraftModel"]), "markov_rank=3, expected 0"),
    ("dspark rank 0", top("architectures", ["DFlashDraftModel"]), "no place for: embed_tokens.weight, lm_head.weight"),
    ("dflash", top("architectures", ["DFlash2DraftModel"]), "conv_kernel_size=missing, selector_rank=missing"),
    # Refused by name.
    ("dspark vanilla", top("architectures", ["Gemma4DSparkModel"]), r"\['Gemma4DSparkModel'\] is refused: Gemma 4"),
    ("dflash", top("architectures", ["A", "B"]), r"architectures=\['A', 'B'\], expected one of DFlashDraftModel"),
    ("dflash", top("architectures", "DFlashDraftModel"), "architectures='DFlashDraftModel', expected one of"),
    ("dflash", top("model_type", "muse_glimmer_assistant"), "'muse_glimmer_assistant' is transformers' own assistant"),
    ("specforge", top("dspark_config", [1]), r"dspark_config=\[1\], expected an object"),
    ("speculators dspark", lambda c: c.pop("speculators_model_type") and c["speculators_config"].pop("algorithm"),
     "speculators_model_type=None, expected one of dflash, dspark"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), CONFIGS)
def test_refused_configs(tmp_path, kind, change, message):
    target = load(tmp_path, kind).target
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, target)


def replaced(name, **values):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        for index, value in values.items():
            tensors[name][int(index[1:])] = value

    return change


TENSORS = [
    ("dspark vanilla", without(W1), f"markov_rank=3, but the weights hold no tensor {W1}"),
    ("dspark vanilla", without(CONFIDENCE), f"enable_confidence_head=True, but .* no tensor {CONFIDENCE}"),
    ("dspark vanilla", without("confidence_head.proj.bias"), "missing from the checkpoint: confidence_head.proj.bias"),
    ("dspark vanilla", without("lm_head.weight"), "'Qwen3DSparkModel'.*no tensor lm_head.weight"),
    ("dspark vanilla", without("embed_tokens.weight"), "no tensor embed_tokens.weight"),
    ("dflash2", without("candidate_selector.successor_codebook"), "selector_rank=3, but .* no .*successor_codebook"),
    ("dflash2", without("layers.0.mlp_conv.base_kernel"), "conv_kernel_size=2, but .* no .*mlp_conv.base_kernel"),
    ("dflash2", without("layers.1.mlp_conv.base_kernel"), "missing from the checkpoint: layers.1.mlp_conv.base_kernel"),
    ("speculators dflash", without("d2t"), f"draft_vocab_size=17 with vocab_size={VOCAB}, .* no tensor d2t"),
    ("speculators dflash", replaced("d2t", _16=90), "tensor d2t leads to token 106, expected ids below vocab_size=23"),
    ("speculators dflash", replaced("d2t", _0=1, _1=0, _2=-1), "tensor d2t leads to 1. tokens, expected 17 distinct"),
    ("speculators dflash", lambda t: t.update(t2d=~t["t2d"]), "tensor t2d marks 6 tokens, expected the 17 that d2t"),
    ("speculators dflash", lambda t: t.update(t2d=t["t2d"][:9]), r"tensor t2d has shape \[9\], expected \[23\]"),
    ("speculators dflash", lambda t: t.update(d2t=t["d2t"].to(torch.int16)), r"tensor d2t is torch.int16 \[17\]"),
    ("speculators dflash", lambda t: t.update(x=torch.zeros(2, dtype=torch.int64)), "tensor x has dtype I64"),
    ("dspark vanilla", lambda t: t.update(d2t=torch.zeros(2, dtype=torch.int64)), "tensor d2t has dtype I64"),
    ("dspark vanilla", lambda t: t[W1].fill_(torch.nan), f"tensor {W1} has NaN or infinite values"),
]


@pytest.mark.parametrize(("kind", "change", "message"), TENSORS)
def test_refused_tensors(tmp_path, kind, change, message):
    target = load(tmp_path, kind).target
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path, target)


def test_an_rnn_that_does_not_sample_from_the_anchor(tmp_path):
    target = fake_target()
    tiny_drafts.KINDS["shifted"] = ("speculators", {"rank": 3, "markov": "rnn", "own": False, "from_anchor": False})
    try:
        tiny_drafts.write(tmp_path, "shifted", target, mask_token_id=MASK, layer_ids=TAPS)
    finally:
        del tiny_drafts.KINDS["shifted"]
    with pytest.raises(CheckpointError, match="markov_head_type='rnn' with sample_from_anchor=False, expected true"):
        load_draft(tmp_path, target)


def test_a_pickle_is_no_checkpoint(tmp_path):
    target = load(tmp_path, "dspark vanilla").target
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors; other weight formats are not read"):
        load_draft(tmp_path, target)
