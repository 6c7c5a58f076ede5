"""A tiny random target, made in memory: for tests of laws, which enumerate its whole vocabulary."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_loaders.layers.attention import ATTENTION
from model_loaders.targets.target import Target


def tiny_target(vocab_size: int = 10, *, seed: int = 0, max_position: int = 256) -> Target:
    """A Llama of two layers and 8 hidden units, float32 on the CPU, without tokenizer and end of sequence.

    Its logits have a standard deviation near 2, so that its distributions have a shape. The caller's random state is
    left alone.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=max_position,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.normal_(1.0, 0.1)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 1.0)
            else:
                weight.normal_(0.0, (2.0 if "lm_head" in name else 1.5) / weight.shape[-1] ** 0.5)
    model.set_attn_implementation(ATTENTION)
    return Target(model.eval().requires_grad_(False), None, name=f"tiny-{vocab_size}-{seed}")
