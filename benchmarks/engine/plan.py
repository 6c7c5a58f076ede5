"""What is measured, under which names and policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prompts import in_turn
from model_loaders import Target
from pipeline import SamplingParams
from pipeline.demo import QUESTIONS

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"top_k": 64, "top_p": 0.95},
    "top-K 32": {"top_k": 32, "return_sampling_mask": True, "sampling_logprobs": "support"},
    "top-K 128": {"top_k": 128, "return_sampling_mask": True, "sampling_logprobs": "support"},
    "filtered": {"top_k": 1024, "top_p": 0.95, "return_sampling_mask": True, "sampling_logprobs": "support"},
}
BRIEF = ("off", "top-K 32")
ORDINARY = "ordinary"
WAVES = 12
"""Prompts of data sets a slot, in a run: they end where they end, so slots are filled again."""


@dataclass(frozen=True)
class Case:
    """One policy at one batch size, for every method."""

    batch: int
    temperature: float
    setting: str

    def arm(self, method: str) -> str:
        """The name of a method's arm."""
        return f"{method}, {self.setting}, {kind(self.temperature)}, batch {self.batch}"

    def params(self, tokens: int, ignore_eos: bool) -> SamplingParams:
        """For every request."""
        return SamplingParams(
            temperature=self.temperature, max_new_tokens=tokens, ignore_eos=ignore_eos, **SETTINGS[self.setting]
        )


def kind(temperature: float) -> str:
    """For names."""
    return "greedy" if temperature == 0 else f"T={temperature:g}"


def cases(batches: Sequence[int], temperatures: Sequence[float], settings: Sequence[str]) -> list[Case]:
    """All of them, the most asked for first."""
    of_first = [Case(batches[0], temperature, setting) for temperature in temperatures for setting in settings]
    return of_first + [Case(batch, temperatures[0], setting) for batch in batches[1:] for setting in settings]


def asked_for(target: Target, batch: int, files: Sequence[Path]) -> list[Any]:
    """What a run of the arms asks: `batch` of the demo's questions, or WAVES times as many prompts of data sets."""
    return in_turn(files, WAVES * batch) if files else prompts_for(target, batch)


def prompts_for(target: Target, count: int) -> list[Any]:
    """The demo's questions, over and over; token ids for a target without a chat template."""
    if target.tokenizer is None or not target.tokenizer.chat_template:
        return [[(7 * i + 3 * j + i * j) % target.vocab_size for j in range(20 + 5 * (i % 8))] for i in range(count)]
    return [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(count)]
