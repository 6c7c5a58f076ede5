"""Tiny random checkpoints on disk, so that tests load everything by the public path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocab_size` >= 8 ids with an EOS token and a chat template.

    From 259 ids on it is byte-level (any text round-trips): ids 0..255 are the bytes, the three
    special tokens follow, the rest are words "w<i>". Below that it is word-level: id 0 is
    "<unk>", ids 1..3 are the special tokens, the rest are words "w<i>" separated by spaces.
    """
    if vocab_size >= 259:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: i for i, letter in enumerate(letters)}
        vocab |= {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
        vocab |= {f"w{i}": i for i in range(259, vocab_size)}
        core = Tokenizer(BPE(vocab=vocab, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        unk = {}
    else:
        vocab = {"<unk>": 0} | {token: 1 + i for i, token in enumerate(SPECIAL_TOKENS)}
        vocab |= {f"w{i}": i for i in range(4, vocab_size)}
        core = Tokenizer(WordLevel(vocab=vocab, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        unk = {"unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS_TOKEN,
        bos_token=SPECIAL_TOKENS[1],
        additional_special_tokens=[SPECIAL_TOKENS[0]],
        clean_up_tokenization_spaces=False,
        **unk,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(
    arch: str,
    *,
    vocab_size: int = 320,
    hidden_size: int = 32,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    tie: bool = False,
    **overrides: Any,
) -> Any:
    """The transformers config of a tiny model; `arch` is a model_type; `overrides` go in last."""
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tie,
        "use_cache": True,
    }
    if arch == "mistral":
        values["sliding_window"] = None
    if arch == "qwen3_moe":
        values |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size,
            "norm_topk_prob": True,
        }
    return AutoConfig.for_model(arch, **(values | overrides))


def write_tiny_target(
    folder: str | Path,
    arch: str = "llama",
    *,
    vocab_size: int = 320,
    hidden_size: int = 32,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    tokenizer: bool = True,
    tie: bool = False,
    logit_std: float = 2.0,
    **config_overrides: Any,
) -> Path:
    """Writes a tiny random float32 safetensors checkpoint with config and tokenizer; returns `folder`.

    `arch`: "llama", "qwen3", "mistral", "qwen3_moe" or any causal model_type that takes the same
    keys. The logits have a standard deviation near `logit_std`, so that the distributions have a
    visible shape. EOS is "<|im_end|>" (id 258 from 259 ids on, else 3). The caller's torch random
    state is left alone.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tok = tiny_tokenizer(vocab_size)
    eos = tok.convert_tokens_to_ids(EOS_TOKEN)
    config = tiny_config(
        arch,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tie=tie,
        eos_token_id=eos,
        bos_token_id=tok.convert_tokens_to_ids(SPECIAL_TOKENS[1]),
        pad_token_id=None,
        **config_overrides,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1.0 + 0.1 * torch.randn_like(weight))
            elif "lm_head" in name or ("embed_tokens" in name and tie):
                weight.normal_(0.0, logit_std / hidden_size**0.5)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 1.0)
            elif weight.ndim >= 2:
                weight.normal_(0.0, 1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    if tokenizer:
        tok.save_pretrained(folder)
    return folder
