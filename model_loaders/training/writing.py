"""The target writes its own training text, many rows at once.

One step runs one token of every row. A row's state (forced tokens, phase, position) lives on the device, so
on CUDA the step is one captured graph; the host looks only every few steps, takes finished rows out and puts
new plans in. Prompts are fed token by token through the same step: they are short beside the answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from model_loaders.training.attention import training_attention
from model_loaders.training.dataset import Text
from model_loaders.training.prompts import Plan


class Writer:
    """Writes plans with `slots` rows side by side; no text is longer than max_length tokens.

    user_tokens: the longest user turn. user_temperature: of the user turns. Texts come in the order in
    which they end; the same seed, device and sizes give the same texts.
    """

    def __init__(
        self,
        target: Any,
        *,
        slots: int,
        max_length: int,
        user_tokens: int = 96,
        user_temperature: float = 0.9,
        seed: int = 0,
        look_every: int = 16,
    ):
        self.target = target
        self.slots, self.max_length, self.user_tokens = slots, max_length, user_tokens
        self.user_temperature, self.look_every = user_temperature, look_every
        self.device = target.device
        self.cache = target.new_cache(slots, max_length)
        self.cache.reserve()
        self.suffix_width = 96
        wide = max_length + self.suffix_width + 1  # a suffix may be written past the end, never read there
        full = self._full
        self.tokens, self.forced = full((slots, wide), 0), full((slots, wide), -1)
        self.suffix, self.suffix_length = full((slots, self.suffix_width), 0), full((slots,), 0)
        self.position, self.answer_start = full((slots,), 0), full((slots,), 0)
        self.user_limit, self.length = full((slots,), 0), full((slots,), 0)
        self.asking = full((slots,), False, torch.bool)
        self.active = full((slots,), False, torch.bool)
        self.temperature = full((slots,), 0.0, torch.float32)
        special = set(target.tokenizer.all_special_ids) if target.tokenizer is not None else set()
        self.eos = torch.tensor(sorted(target.eos_token_ids) or [-1], device=self.device)
        self.turn_ends = torch.tensor(sorted(special | set(target.eos_token_ids)) or [-1], device=self.device)
        torch.manual_seed(seed)

    def write(self, plans: Iterable[Plan], count: int, *, time_limit: float | None = None) -> list[Text]:
        """Up to `count` texts, fewer if the plans or time_limit (seconds) run out first. Shows progress."""
        source, texts = iter(plans), list[Text]()
        exhausted = False
        begun, started, bar = time.monotonic(), 0, tqdm(total=count, desc="writing", unit="text")
        with training_attention(self.target), torch.inference_mode():
            step = self._captured_step()
            free = list(range(self.slots))
            while True:
                fresh = []
                for slot in free:
                    plan = next(source, None) if started < count else None
                    if plan is None:
                        exhausted = True
                        break
                    fresh.append((slot, plan))
                    started += 1
                self._admit(fresh)
                for _ in range(self.look_every):
                    step()
                busy = self.active.tolist()
                ended = (self.length > 0).nonzero().flatten()
                for row in self._take(ended):
                    texts.append(row)
                bar.update(len(ended))
                free = [slot for slot in range(self.slots) if not busy[slot]]
                late = time_limit is not None and time.monotonic() - begun > time_limit
                if late or (exhausted and not any(busy)):
                    break
        bar.close()
        return texts

    def _step(self) -> None:
        """One token of every row, in place. Rows that aren't active repeat their last token harmlessly."""
        rows = self.position.unsqueeze(1)
        output = self.target.forward(
            self.tokens.gather(1, rows), rows, self.cache, kv_length=self.max_length, last_only=True
        )
        logits = output.logits[:, -1].float()
        temperature = torch.where(self.asking, self.user_temperature, self.temperature)
        # argmax(logits + T * Gumbel) is a sample of softmax(logits / T), and the argmax for T = 0.
        gumbel = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_().neg_()
        sampled = torch.argmax(logits + temperature.unsqueeze(1) * gumbel, dim=-1)

        following = rows + 1
        forced = self.forced.gather(1, following).squeeze(1)
        after = self.position + 1
        turn_over = self.asking & (forced < 0) & (_is_one_of(sampled, self.turn_ends) | (after >= self.user_limit))
        span = following + torch.arange(self.suffix_width, device=self.device)
        suffix = torch.where(turn_over.unsqueeze(1), self.suffix, self.forced.gather(1, span))
        self.forced.scatter_(1, span, suffix)
        forced = self.forced.gather(1, following).squeeze(1)
        token = torch.where(forced >= 0, forced, sampled)
        self.answer_start.copy_(torch.where(turn_over, after + self.suffix_length, self.answer_start))
        answering = ~self.asking & (after >= self.answer_start)
        over = (answering & _is_one_of(token, self.eos)) | (after + 1 >= self.max_length)
        self.asking.logical_and_(~turn_over)
        kept = self.tokens.gather(1, following).squeeze(1)
        self.tokens.scatter_(1, following, torch.where(self.active, token, kept).unsqueeze(1))
        self.length.copy_(torch.where(self.active & over, after + 1, self.length))
        self.active.logical_and_(~over)
        self.position.copy_(torch.where(self.active, after, self.position))

    def _captured_step(self) -> Any:
        if self.device.type != "cuda":
            return self._step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up outside the graph: lazy allocations and kernel choices
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _admit(self, fresh: list[tuple[int, Plan]]) -> None:
        """Put plans into free slots. One upload an array, whatever the number of rows."""
        if not fresh:
            return
        slots = torch.tensor([slot for slot, _ in fresh], device=self.device)
        room = self.max_length // 2  # the rest is for the answer
        prefixes = [plan.prefix[:room] for _, plan in fresh]
        suffixes = [(plan.suffix or ())[: self.suffix_width] for _, plan in fresh]
        wide = self.tokens.shape[1]
        forced = _padded(prefixes, wide, -1).to(self.device)
        self.forced[slots] = forced
        self.tokens[slots] = forced.clamp(min=0)
        self.suffix[slots] = _padded(suffixes, self.suffix_width, -1).to(self.device)
        lengths = torch.tensor([len(prefix) for prefix in prefixes], device=self.device)
        self.suffix_length[slots] = torch.tensor([len(s) for s in suffixes], device=self.device)
        self.asking[slots] = torch.tensor([plan.suffix is not None for _, plan in fresh], device=self.device)
        self.temperature[slots] = torch.tensor([plan.temperature for _, plan in fresh], device=self.device)
        self.answer_start[slots] = lengths
        self.user_limit[slots] = lengths + self.user_tokens
        self.position[slots] = 0
        self.length[slots] = 0
        self.active[slots] = True

    def _take(self, slots: Tensor) -> list[Text]:
        """The finished texts of these slots; a text without two tokens of answer is dropped."""
        tokens, lengths = self.tokens[slots].cpu(), self.length[slots].tolist()
        starts, temperatures = self.answer_start[slots].tolist(), self.temperature[slots].tolist()
        self.length[slots] = 0
        return [
            Text(row[:length].to(torch.int32), start, temperature)
            for row, length, start, temperature in zip(tokens, lengths, starts, temperatures, strict=True)
            if start + 2 <= length
        ]

    def _full(self, shape: tuple[int, ...], value: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)


def _is_one_of(tokens: Tensor, few: Tensor) -> Tensor:
    """torch.isin, which may wait for the device, for a few values."""
    return (tokens.unsqueeze(1) == few).any(1)


def _padded(rows: list[tuple[int, ...]], width: int, value: int) -> Tensor:
    out = torch.full((len(rows), width), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return out
