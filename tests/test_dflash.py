"""The DFlash draft's inference against the cache-less oracle, over ragged batches and several rounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from model_loaders.drafts.backbone import FULL, SLIDING, Backbone, DraftConfig
from model_loaders.drafts.dflash import DFlashDraft
from tests import naive_dflash

VOCAB, MASK = 61, 60


def make_draft(seed: int = 0, **overrides) -> DFlashDraft:
    """A random float32 draft over a fake target: an embedding and a head are all that a draft borrows."""
    config = DraftConfig(
        **{
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "layer_types": (FULL, FULL),
            "target_layer_ids": (0, 2, 3),
            "num_target_layers": 5,
            "block_size": 4,
            "mask_token_id": MASK,
        }
        | overrides
    )
    generator = torch.Generator().manual_seed(seed)
    module = Backbone(config)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if "norm" in name else noise / weight.shape[-1] ** 0.5)
    embedding = torch.randn(VOCAB, config.hidden_size, generator=generator)
    head = torch.randn(VOCAB, config.hidden_size, generator=generator)
    target = SimpleNamespace(embed=lambda ids: embedding[ids], head=lambda hidden: hidden @ head.T)
    return DFlashDraft(module.eval(), target)


def logits_of(draft, *arguments, **options):
    """The logits [b, D, V] behind a proposal."""
    return draft.logits(draft.hidden(*arguments, **options))


def naive_logits(draft: DFlashDraft, features: torch.Tensor, anchor: int, frequencies=None, scale=1.0):
    c = draft.config
    ids = torch.tensor([anchor] + [c.mask_token_id] * (c.block_size - 1))
    hidden = naive_dflash.block_hidden(
        {name: tensor.double() for name, tensor in draft.module.state_dict().items()},
        features.double(),
        draft.target.embed(ids).double(),
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        inverse_frequencies=frequencies or naive_dflash.plain_frequencies(c.head_dim, c.rope["rope_theta"]),
        rope_scale=scale,
        layer_kinds=[(c.is_causal(i), c.window(i)) for i in range(c.num_layers)],
    )
    return draft.target.head(hidden[1:].float())


KINDS = {
    "full": {},
    "sliding": {"layer_types": (SLIDING, FULL, SLIDING), "sliding_window": 5},
    "sliding, not causal": {"layer_types": (SLIDING, FULL), "sliding_window": 3, "causal": False},
    "causal": {"causal": True},
    "bias": {"attention_bias": True, "num_key_value_heads": 6, "block_size": 6},
    "window of one": {"layer_types": (SLIDING,), "sliding_window": 1, "target_layer_ids": (3,)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rounds_equal_the_oracle(kind):
    """Four rounds over rows of different lengths, with padding and rejected rows left in the cache."""
    draft = make_draft(**KINDS[kind])
    c, block = draft.config, draft.block_size
    generator = torch.Generator().manual_seed(1)
    width = len(c.target_layer_ids) * c.hidden_size
    lengths = [3, 9, 1, 6]
    slots = [4, 0, 2, 3]
    cache = draft.new_cache(5, 40)
    prompt = torch.randn(4, max(lengths), width, generator=generator)
    draft.extend(prompt, torch.arange(max(lengths)).expand(4, -1), cache, slots)  # padded on the right
    kept = [prompt[row, :n] for row, n in enumerate(lengths)]
    for _ in range(4):
        starts = torch.tensor([len(rows) for rows in kept])
        anchors = torch.randint(0, VOCAB - 1, (4,), generator=generator)
        logits = logits_of(draft, anchors, starts, cache, slots)
        assert logits.shape == (4, block - 1, VOCAB)
        for row in range(4):
            expected = naive_logits(draft, kept[row], int(anchors[row]))
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)
        # The target's features of the whole block; only the first accepted + 1 rows are kept.
        features = torch.randn(4, block, width, generator=generator)
        draft.extend(features, starts[:, None] + torch.arange(block), cache, slots)
        for row in range(4):
            accepted = int(torch.randint(0, block, (), generator=generator))
            kept[row] = torch.cat([kept[row], features[row, : accepted + 1]])


def test_kv_length_only_adds_hidden_keys():
    draft = make_draft()
    cache = draft.new_cache(2, 32)
    draft.extend(torch.randn(2, 7, 72), torch.arange(7).expand(2, -1), cache)
    anchors, starts = torch.tensor([3, 4]), torch.tensor([7, 5])
    short = logits_of(draft, anchors, starts, cache)
    torch.testing.assert_close(logits_of(draft, anchors, starts, cache, kv_length=32), short, atol=1e-5, rtol=1e-5)


def test_one_slot_does_not_see_another():
    draft = make_draft()
    features, at = torch.randn(1, 6, 72), torch.arange(6)[None]
    alone, shared = draft.new_cache(1, 16), draft.new_cache(3, 16)
    draft.extend(features, at, alone)
    draft.extend(torch.randn(3, 12, 72), torch.arange(12).expand(3, -1), shared)
    draft.extend(features, at, shared, [1])
    anchors, starts = torch.tensor([9]), torch.tensor([6])
    torch.testing.assert_close(logits_of(draft, anchors, starts, shared, [1]), logits_of(draft, anchors, starts, alone))


def test_scaled_rope_is_used():
    """Linear scaling by 4 is the plain rotation at a quarter of the position."""
    draft = make_draft(rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    frequencies = [f / 4 for f in naive_dflash.plain_frequencies(8, 500.0)]
    features = torch.randn(5, 72)
    cache = draft.new_cache(1, 16)
    draft.extend(features[None], torch.arange(5)[None], cache)
    logits = logits_of(draft, torch.tensor([2]), torch.tensor([5]), cache)[0]
    torch.testing.assert_close(logits, naive_logits(draft, features, 2, frequencies), atol=1e-5, rtol=1e-5)


def test_interface_figures():
    draft = make_draft(block_size=6)
    assert (draft.method, draft.block_size, draft.num_drafts, draft.mask_token_id) == ("dflash", 6, 5, MASK)
    assert draft.target_layer_ids == (0, 2, 3)
    assert len(draft.sha256) == 64
    assert draft.sha256 == make_draft(block_size=6).sha256 != make_draft(seed=1, block_size=6).sha256
