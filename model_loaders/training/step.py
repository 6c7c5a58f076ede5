"""Forward and backward of one training step, on CUDA as one graph: eager steps are bound by their launches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from model_loaders.drafts.dflash2 import DFlash2Config
from model_loaders.drafts.dspark import DSparkConfig, DSparkModule
from model_loaders.layers.taps import LayerTaps
from model_loaders.training import dflash2, dspark
from model_loaders.training.attention import training_attention
from model_loaders.training.blocks import block_hidden
from model_loaders.training.dataset import Batch
from model_loaders.training.loss import LossWeights, StepStats, batch_loss, compare, compiled_compare


class Step:
    """The loss of a module's blocks, and the gradients of its float32 weights that ask for one in their `.grad`.

    feature_scale float32 [m*d]: what the target's features are multiplied by. The forward runs on copies of the weights
    in the target's dtype. compiled: fuse the loss (CUDA).
    """

    def __init__(self, target: Any, module: Any, feature_scale: Tensor, weights: LossWeights, *, compiled: bool):
        self._target, self._module, self._scale, self._weights = target, module, feature_scale, weights
        self._comparing = compiled_compare() if compiled else compare
        self._choosing = dflash2.compiled_compare_candidates() if compiled else dflash2.compare_candidates
        self._named = dict(module.named_parameters())
        self._graph: Any = None

    def loss(self, batch: Batch, anchors: Tensor, real: Tensor) -> StepStats:
        """The loss alone, launched piece by piece."""
        with torch.no_grad():
            return self._run(batch, anchors, real, backward=False)

    def gradients(self, batch: Batch, anchors: Tensor, real: Tensor) -> StepStats:
        """The loss, and the weights' gradients of this batch alone. Batches of one shape.

        On CUDA from a graph, whose gradients stay where they are: don't set them to None between steps.
        """
        if batch.tokens.device.type != "cuda":
            self._forget()
            return self._run(batch, anchors, real, backward=True)
        if self._graph is None:
            self._capture(batch, anchors, real)
        for static, fresh in zip(self._inputs, (*batch.tensors(), anchors, real), strict=True):
            static.copy_(fresh)
        self._graph.replay()
        return StepStats(*(getattr(self._stats, name).clone() for name in StepStats.__dataclass_fields__))

    def _capture(self, batch: Batch, anchors: Tensor, real: Tensor) -> None:
        self._inputs = tuple(tensor.clone() for tensor in (*batch.tensors(), anchors, real))
        run = partial(self._run, Batch(*self._inputs[:-2]), *self._inputs[-2:], backward=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy allocations, kernel choices and compilation happen outside the graph
            for _ in range(3):
                self._forget()
                run()
        torch.cuda.current_stream().wait_stream(side)
        self._forget()  # so that the graph makes gradients, rather than adding to them
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._stats = run()

    def _forget(self) -> None:
        for weight in self._named.values():
            weight.grad = None

    def _run(self, batch: Batch, anchors: Tensor, real: Tensor, *, backward: bool) -> StepStats:
        target, module = self._target, self._module
        config = module.config
        copies = {name: weight.to(target.dtype) for name, weight in self._named.items()}
        features, target_hidden = target_states(target, config.target_layer_ids, batch.tokens)
        features = features * self._scale.to(features.dtype)
        ids = torch.full((*anchors.shape, config.block_size), config.mask_token_id, device=anchors.device)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        hidden = block_hidden(module, target.embed(ids), features, anchors, copies)
        if isinstance(config, DSparkConfig):
            assert isinstance(module, DSparkModule)
            num_drafts = config.block_size
            outputs = dspark.before_heads(module, copies, hidden, _previous(batch.tokens, anchors, num_drafts))
            heads: Any = partial(dspark.heads, config, copies, target.head)
        elif isinstance(config, DFlash2Config) and config.selector_rank:
            num_drafts = config.block_size - 1
            previous = _previous(batch.tokens, anchors, num_drafts)
            outputs = dflash2.before_heads(copies, hidden[:, :, 1:], previous)
            heads = partial(dflash2.heads, config, copies, target.head)
        else:
            num_drafts, outputs = config.block_size - 1, [hidden[:, :, 1:]]

            def heads(rows: list[Tensor]) -> tuple[Tensor, None]:
                return target.head(rows[0]), None

        return batch_loss(
            outputs, heads, target.head, target_hidden, batch, anchors, real, num_drafts, self._weights,
            backward=backward, comparing=self._comparing, choosing=self._choosing,
        )  # fmt: skip


def _previous(tokens: Tensor, anchors: Tensor, num_drafts: int) -> Tensor:
    """The text's token before each draft, int64 [b, A, D], of tokens [b, L]: the anchor before the first."""
    at = anchors.unsqueeze(-1) + torch.arange(num_drafts, device=anchors.device)
    return tokens.gather(1, at.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(at)


@torch.no_grad()
def target_states(target: Any, layer_ids: tuple[int, ...], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Features [b, L, m*d] and the states that enter the head [b, L, d] of tokens int64 [b, L].

    Texts are padded on the right, so plain causal attention is right for every real token.
    """
    taps = LayerTaps(target.layers, layer_ids)
    try:
        with training_attention(target):
            out = target.model.base_model(input_ids=tokens, use_cache=False)
        features = taps.features()
    finally:
        taps.remove()
    assert features is not None
    return features, out.last_hidden_state
