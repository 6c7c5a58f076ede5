"""Tiny pairs and pipelines for tests, built once a process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch

from model_loaders import load_draft, load_target, save_draft
from model_loaders.drafts.backbone import Backbone, DraftConfig
from model_loaders.drafts.dflash import DFlashDraft
from pipeline import SpeculativePipeline
from tests import tiny_drafts
from tests.tiny_models import write_tiny_target

FOLDER = tempfile.TemporaryDirectory(prefix="specmask-tests-")


@functools.cache
def target_folder(vocab_size=320, arch="llama", **shape) -> Path:
    name = "-".join(map(str, (arch, vocab_size, *sorted(shape.items()))))
    if vocab_size < 32:  # for the law: as small as a model can be, because it runs a hundred thousand times
        shape = {"hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "num_layers": 2} | shape
    return write_tiny_target(Path(FOLDER.name) / name, arch, vocab_size=vocab_size, **({"num_layers": 3} | shape))


@functools.cache
def target(vocab_size=320, arch="llama", **shape):
    """A tiny random target in float32 on the CPU."""
    return load_target(target_folder(vocab_size, arch, **shape), device="cpu")


@functools.cache
def draft_folder(vocab_size=320, block_size=4, seed=0) -> Path:
    """A random, so bad, DFlash draft for `target(vocab_size)`, written in the public format."""
    loaded = target(vocab_size)
    config = DraftConfig(
        hidden_size=loaded.hidden_size,
        intermediate_size=2 * loaded.hidden_size,
        num_attention_heads=loaded.config.num_attention_heads,
        num_key_value_heads=loaded.config.num_key_value_heads,
        head_dim=8,
        layer_types=("full_attention",),
        target_layer_ids=tuple(range(loaded.num_layers - 1)),
        num_target_layers=loaded.num_layers,
        block_size=block_size,
        mask_token_id=0,
        vocab_size=vocab_size,
    )
    generator = torch.Generator().manual_seed(seed)
    module = Backbone(config)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else noise / weight.shape[-1] ** 0.5)
    folder = Path(FOLDER.name) / f"draft-{vocab_size}-{block_size}-{seed}"
    save_draft(folder, DFlashDraft(module.eval(), loaded))
    return folder


@functools.cache
def draft(vocab_size=320, block_size=4, seed=0) -> DFlashDraft:
    return load_draft(str(draft_folder(vocab_size, block_size, seed)), target(vocab_size))


@functools.cache
def draft_of_kind(kind, vocab_size=320, block_size=4, seed=0):
    """A random draft of one of `tiny_drafts.KINDS` for `target(vocab_size)`, loaded from its own layout."""
    loaded = target(vocab_size)
    folder = tiny_drafts.write(
        Path(FOLDER.name) / f"{kind}-{vocab_size}-{block_size}-{seed}",
        kind,
        loaded,
        block_size=block_size,
        layer_ids=tuple(range(loaded.num_layers - 1)),
        seed=seed,
    )
    return load_draft(folder, loaded)


def pipe_of_kind(kind, vocab_size=320, block_size=4, **options) -> SpeculativePipeline:
    """A fresh pipeline over the tiny target and a draft of this kind."""
    options = {"max_batch": 4, "max_length": 128} | options
    return SpeculativePipeline(target(vocab_size), draft_of_kind(kind, vocab_size, block_size), **options)


def pipe(speculative=True, vocab_size=320, block_size=4, **options) -> SpeculativePipeline:
    """A fresh pipeline over the tiny pair."""
    options = {"max_batch": 4, "max_length": 128} | options
    return SpeculativePipeline(target(vocab_size), draft(vocab_size, block_size) if speculative else None, **options)


@torch.inference_mode()
def logits_after(token_ids, vocab_size=320) -> np.ndarray:
    """The target's logits after a prefix, by a cache-less forward: float64 [V]."""
    ids = torch.tensor([list(token_ids)])
    return target(vocab_size).model(input_ids=ids, use_cache=False).logits[0, -1].double().numpy()


class PerfectDrafts:
    """Put in the draft stage's place: the target's own argmax after every prefix, so drafts are often accepted."""

    def __init__(self, vocab_size=320):
        self.vocab_size = vocab_size
        self.known: dict[tuple[int, ...], int] = {}

    def __call__(self, state):
        from pipeline.stages import Draft

        proposal = Draft()(state)
        tokens = np.array(proposal.draft_tokens)
        for row, request in zip(tokens, proposal.requests, strict=True):
            prefix = [*request.prompt.token_ids.tolist(), *request.token_ids]
            for i in range(len(row)):
                row[i] = self.after(tuple(prefix))
                prefix.append(int(row[i]))
        return type(proposal)(proposal.requests, tokens, proposal.num_drafts)

    def after(self, prefix):
        if prefix not in self.known:
            self.known[prefix] = int(logits_after(prefix, self.vocab_size).argmax())
        return self.known[prefix]
