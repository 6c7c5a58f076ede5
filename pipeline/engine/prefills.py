"""Prompts on their way through the target, chunk by chunk beside rounds, so that they hold nobody up.

On CUDA a chunk is padded to one of a few widths, so that it is a graph too: a small model's forward takes the host
several times as long as the device. The padding lies behind the prompt, where the first blocks overwrite it before
anybody sees it. A chunk's shape depends on its own prompt only, and so do a request's numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import numpy as np
import torch

from model_loaders.kv_cache import DeviceSlots
from pipeline.arrays import send
from pipeline.batch.request import Request
from pipeline.batch.state import State
from pipeline.engine.branch import Branch
from pipeline.engine.buckets import kv_bucket, slots_bucket
from pipeline.engine.graphs import Graphs
from pipeline.stages.prefill import Prefix, end_prompt, run_chunk, share_prefix

LEAST_WIDTH = 16
"""The narrowest padded chunk, in tokens."""


class Prefills:
    """The requests that have a slot and no first token yet: a queue, first come, first served, and those behind it.

    Chunks may run while a round does (`beside`): its idle rows write behind a prompt (`Slot.of`), chunks up to its end
    and into what the first blocks overwrite, and their graphs have memory of their own.

    Args:
        state: The pipeline's.
        first_logits: [S, 1, V]: where the logits behind a prompt go, by slot.
        graphs: Captures chunks; None: they are launched piece by piece.

    Attributes:
        padded: Whether chunks are padded; not on the CPU, where every row costs.
    """

    def __init__(self, state: State, first_logits: torch.Tensor, graphs: Graphs | None):
        self.state, self.first_logits, self.graphs = state, first_logits, graphs
        self.padded = state.target.device.type != "cpu"
        self._queue: deque[tuple[Request, int]] = deque()
        self._through: list[Request] = []
        self._branch, self._is_beside = Branch(state.target.device), False
        # What siblings left, copied beside a round: made on either stream, and given back only behind both.
        self._copied: list[Prefix] = []
        # Per width: slot, start, index of the last token, then the tokens.
        self._inputs: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._through)

    def __contains__(self, request: object) -> bool:
        return request in self.requests

    @property
    def requests(self) -> set[Request]:
        """Those that are on their way."""
        return {*self._through, *(one for one, _ in self._queue)}

    def add(self, requests: Iterable[Request]) -> None:
        """Queue them."""
        self._queue.extend((request, 0) for request in requests)

    def keep(self, running: Collection[Request]) -> None:
        """Forget those that no longer have a slot."""
        self._queue = deque(entry for entry in self._queue if any(entry[0] is request for request in running))
        self._through = [one for one in self._through if any(one is request for request in running)]

    def clear(self) -> None:
        """Forget all."""
        self._queue.clear()
        self._through.clear()

    def take_through(self) -> list[Request]:
        """Those whose logits are there, once; behind `join`."""
        through, self._through = self._through, []
        return through

    def beside(self, tokens: int) -> None:
        """`advance` beside what is queued from now on, up to the next `join`."""
        if self._queue:
            with self._branch.beside():
                self._is_beside = True
                self.advance(tokens)

    def join(self) -> None:
        """What is queued from now on runs behind the chunks."""
        if self._is_beside:
            self._branch.join()
            self._is_beside = False
        self._copied.clear()

    def advance(self, tokens: int | None) -> None:
        """Run prompts until about so many tokens are through, a chunk at least (None: all).

        A sample whose prompt a sibling has been through costs a copy, not a forward.
        """
        spent = 0
        while self._queue and (tokens is None or spent < tokens):
            request, start = self._queue.popleft()
            left = request.prompt.prefix if start == 0 else None
            end = len(request.prompt.token_ids)
            if left is not None:
                self._copied.append(left)
                self.first_logits[request.slot].copy_(share_prefix(self.state, request, left)[0])
            else:
                end = self._chunk(request, start)
                spent += end - start
            if end == len(request.prompt.token_ids):
                self._through.append(request)
            else:
                self._queue.appendleft((request, end))

    def _chunk(self, request: Request, start: int) -> int:
        """Run one chunk; where it ends."""
        state, token_ids = self.state, request.prompt.token_ids
        end = min(start + state.options.prefill_chunk, len(token_ids))
        width = slots_bucket(max(end - start, LEAST_WIDTH), max(state.options.prefill_chunk, LEAST_WIDTH))
        if not self.padded or start + width > state.target_cache.max_length:
            end, logits = run_chunk(state, request, start)
            if logits is not None:
                self.first_logits[request.slot].copy_(logits[0])
            return end
        inputs = self._inputs.get(width)
        if inputs is None:
            with torch.inference_mode(False):
                inputs = torch.zeros(3 + width, dtype=torch.int64, device=state.target.device)
            self._inputs[width] = inputs
        values = np.zeros(3 + width, np.int64)
        values[:3] = request.slot, start, end - start - 1
        values[3 : 3 + end - start] = token_ids[start:end]
        inputs.copy_(send(values, state.target.device))
        kv_length = kv_bucket(start + width, state.target_cache.max_length)
        if self.graphs is None:
            self._body(inputs, kv_length)
        else:
            self.graphs.run(("prefill", width, kv_length), lambda: self._body(inputs, kv_length))
        if end == len(token_ids):
            end_prompt(state, request, self.first_logits[request.slot][None])
        return end

    def _body(self, inputs: torch.Tensor, kv_length: int) -> None:
        """The device work of a padded chunk."""
        state = self.state
        slot, start, last, ids = inputs[:1], inputs[1:2], inputs[2:3], inputs[None, 3:]
        positions = start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        slots = DeviceSlots(slot)
        state.tap()
        output = state.target.forward(
            ids, positions, state.target_cache, slots=slots, last_only=last, kv_length=kv_length
        )
        if state.draft is not None:
            state.draft.extend(output.features, positions, state.draft_cache, slots=slots, kv_length=kv_length)
        self.first_logits.index_copy_(0, slot, output.logits)
