"""Written texts in memory and on disk.

One safetensors file: ``tokens`` int32 [total], ``offsets`` int64 [n+1], ``answer_starts`` int32 [n] (index of
the answer's first token in its text), ``temperatures`` float32 [n].
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_loaders.errors import CheckpointError


@dataclass(frozen=True)
class Text:
    """tokens int32 [n], prompt first; the answer begins at answer_start; temperature: the answer's."""

    tokens: Tensor
    answer_start: int
    temperature: float


@dataclass(frozen=True)
class Batch:
    """tokens int64 [b, L] (padded with 0 on the right), lengths and answer_starts int64 [b], temperatures
    float32 [b]."""

    tokens: Tensor
    lengths: Tensor
    answer_starts: Tensor
    temperatures: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.lengths, self.answer_starts, self.temperatures


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write the texts; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    lengths = torch.tensor([0] + [len(text.tokens) for text in texts])
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]),
        "offsets": lengths.cumsum(0),
        "answer_starts": torch.tensor([text.answer_start for text in texts], dtype=torch.int32),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
    }
    save_file(tensors, part)
    os.replace(part, path)


def load_texts(path: Path) -> list[Text]:
    """Read what save_texts wrote. Raises CheckpointError if the file lacks a tensor."""
    found = load_file(path)
    if missing := {"tokens", "offsets", "answer_starts", "temperatures"} - found.keys():
        raise CheckpointError(f"{path} lacks {sorted(missing)}; it is no file of written texts")
    bounds = found["offsets"].tolist()
    return [
        Text(found["tokens"][a:b], int(start), float(temperature))
        for a, b, start, temperature in zip(
            bounds[:-1], bounds[1:], found["answer_starts"], found["temperatures"], strict=True
        )
    ]


class Batches:
    """Shuffled batches of fixed shape [size, length], the same for a seed and step on every machine."""

    def __init__(self, texts: Sequence[Text], size: int, length: int, seed: int):
        if not texts:
            raise CheckpointError("no texts to train on; raise --samples or --max-length")
        self.texts, self.size, self.length, self.seed = texts, size, length, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def at(self, step: int) -> Batch:
        """The batch of a step; epochs are permutations of all texts, one after another."""
        picked = [self.texts[self._index(step * self.size + i)] for i in range(self.size)]
        return collate(picked, self.length)

    def _index(self, number: int) -> int:
        epoch, place = divmod(number, len(self.texts))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.texts), generator=generator)
        return int(self._order[place])


def collate(texts: Sequence[Text], length: int) -> Batch:
    """A padded batch; longer texts are cut at `length` tokens."""
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        cut = text.tokens[:length]
        tokens[row, : len(cut)] = cut
    lengths = torch.tensor([min(len(text.tokens), length) for text in texts])
    starts = torch.tensor([text.answer_start for text in texts])
    return Batch(tokens, lengths, starts, torch.tensor([text.temperature for text in texts]))
