"""transformers' generate on the same model and prompts, loaded and run as its users do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.arms import synchronize
from model_loaders import Target
from model_loaders.targets.demo import demo_target_folder

EAGER, STATIC, COMPILED = "generate", "generate, static", "generate, static and compiled"
MODES: dict[str, dict[str, Any]] = {
    EAGER: {},
    STATIC: {"cache_implementation": "static", "disable_compile": True},
    COMPILED: {"cache_implementation": "static"},
}


class Peer:
    """transformers' own model; greedy, the prompts as one batch, padded on the left."""

    def __init__(self, name: str, target: Target, prompts: Sequence[Any], tokens: int):
        source = demo_target_folder() if name == "demo" else name
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype).to(target.device).eval()
        rows = [prompt if isinstance(prompt[0], int) else target.render_chat(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        self.ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=target.device)
        self.mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=target.device)
        self.tokens = tokens

    def rate_in(self, mode: str) -> Callable[[], float]:
        """A function that generates once and returns tokens a second."""

        def run() -> float:
            synchronize()
            started = time.perf_counter()
            with torch.inference_mode():
                out = self.model.generate(
                    self.ids, attention_mask=self.mask, max_new_tokens=self.tokens, min_new_tokens=self.tokens,
                    do_sample=False, pad_token_id=0, **MODES[mode],
                )  # fmt: skip
            synchronize()
            return len(self.ids) * (out.shape[1] - self.ids.shape[1]) / (time.perf_counter() - started)

        return run
