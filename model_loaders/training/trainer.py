"""The training loop of a DFlash, DSpark or DFlash 2 draft, its checkpoints and its log.

Master weights and optimiser state are float32; the forward runs on a copy in the target's dtype, which is how
the draft will run later. The target's features are computed on the fly. A step depends on its number, the
seed and the weights alone, so a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from model_loaders.drafts.backbone import Backbone, DraftConfig
from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.checkpoint import METHODS
from model_loaders.drafts.dflash2 import DFlash2Config
from model_loaders.errors import CheckpointError
from model_loaders.training.blocks import draw_anchors
from model_loaders.training.dataset import Batch, Batches, Text, collate
from model_loaders.training.dflash2 import SELECTOR
from model_loaders.training.loss import LossWeights, StepStats
from model_loaders.training.optimizer import Optimizer
from model_loaders.training.step import Step, target_states


@dataclass(frozen=True)
class TrainingOptions:
    """steps: optimiser steps in all. batch: texts a step. anchors: blocks a text. length: tokens a text is
    cut to. loss: see training/loss.py. warmup: share of the steps. every: steps between checkpoints and
    held-out losses. compiled: fuse the loss (CUDA). freeze_backbone: train DFlash 2's selector alone.
    """

    steps: int = 4000
    batch: int = 32
    anchors: int = 64
    length: int = 640
    learning_rate: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    loss: LossWeights = field(default_factory=LossWeights)
    seed: int = 0
    every: int = 500
    log_every: int = 20
    compiled: bool = False
    freeze_backbone: bool = False


def new_module(config: DraftConfig) -> Backbone:
    """The module of a configuration, of its class's method."""
    return METHODS[type(config)][0](config)


class Trainer:
    """Trains one module in `folder`, which gets log.jsonl and training/state.safetensors."""

    def __init__(
        self,
        target: Any,
        config: DraftConfig,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        options: TrainingOptions,
        folder: Path,
    ):
        self.target, self.config, self.options, self.folder = target, config, options, folder
        self.device, self.dtype = target.device, target.dtype
        self.held_out = [collate(list(held_out[i : i + options.batch]), options.length)
                         for i in range(0, len(held_out), options.batch)]  # fmt: skip
        self.batches = Batches(texts, options.batch, options.length, options.seed)
        self.module = new_module(config)
        initialise(self.module, options.seed)
        self.module.to(self.device)
        self.named = dict(self.module.named_parameters())
        if options.freeze_backbone:
            for name, weight in self.named.items():
                weight.requires_grad_(name.startswith(SELECTOR))
        self.trained = {name: weight for name, weight in self.named.items() if weight.requires_grad}
        if not self.trained:
            raise CheckpointError("freeze_backbone=True, expected a draft with a selector; there is nothing to train")
        self.optimizer = Optimizer(self.trained, options.weight_decay)
        self.step = 0
        self.feature_scale = self._feature_scale()
        self.blocks = Step(target, self.module, self.feature_scale, options.loss, compiled=options.compiled)
        self.state_file = folder / "training" / "state.safetensors"
        self.state_file.parent.mkdir(parents=True, exist_ok=True)

    def train(
        self,
        *,
        until: int | None = None,
        seconds: float | None = None,
        on_checkpoint: Callable[[], None] | None = None,
    ) -> bool:
        """Run to step `until` (None: the last) or for so many seconds. Returns whether training is over."""
        options, begun = self.options, time.monotonic()
        last = options.steps if until is None else min(until, options.steps)
        bar = tqdm(total=last, initial=self.step, desc="training", unit="step")
        window: list[StepStats] = []
        while self.step < last and (seconds is None or time.monotonic() - begun < seconds):
            window.append(self.one_step())
            self.step += 1
            bar.update()
            if self.step % options.log_every == 0 or self.step == last:
                row = _means(window)
                self._log({"step": self.step, "lr": self.learning_rate(self.step - 1), **row})
                bar.set_postfix(loss=f"{row['loss']:.3f}", first=f"{row['accuracy'][0]:.3f}")
                window = []
            if self.step % options.every == 0 and self.step < last:
                self._log({"step": self.step, "held_out": self.evaluate()})
                self.save()
                if on_checkpoint is not None:
                    on_checkpoint()
        bar.close()
        self._log({"step": self.step, "held_out": self.evaluate()})
        self.save()
        return self.step >= options.steps

    def one_step(self) -> StepStats:
        """One optimiser step on the batch of `self.step`."""
        options = self.options
        batch = self.batches.at(self.step).to(self.device)
        stats = self.blocks.gradients(batch, *self._anchors(batch, self.step))
        torch.nn.utils.clip_grad_norm_(list(self.trained.values()), options.clip)
        self.optimizer.step(self.learning_rate(self.step))
        return stats

    @torch.no_grad()
    def start_from(self, draft: BlockDraft) -> None:
        """Begin with a trained draft's weights; CheckpointError if it is of another shape.

        Its MLPs may be narrower, and a DFlash draft may get DFlash 2's parts. What it lacks keeps its first weights,
        but adds nothing to the output yet: the draft that training begins with is the one that was given.
        """
        check_start(draft, self.config)
        narrow = draft.config.intermediate_size
        for name, weight in draft.module.float().state_dict().items():
            own = self.named[name]
            if name.endswith("down_proj.weight"):
                own[:, narrow:] = 0
            own[tuple(slice(size) for size in weight.shape)] = weight
        self.module.fc.weight.div_(self.feature_scale)

    @torch.no_grad()
    def result(self) -> Backbone:
        """The trained module for features as they come, float32 on the CPU."""
        module = new_module(self.config)
        module.load_state_dict({name: weight.cpu() for name, weight in self.module.state_dict().items()})
        module.fc.weight.mul_(self.feature_scale.cpu())
        return module

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Of held-out texts the loss and, by position, accuracy, the guesses' probability and the overlap."""
        stats = []
        for i, held_out in enumerate(self.held_out):
            batch = held_out.to(self.device)
            stats.append(self.blocks.loss(batch, *self._anchors(batch, -1 - i)))
        return _means(stats)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        options = self.options
        warm = max(1, round(options.warmup * options.steps))
        if step < warm:
            return options.learning_rate * (step + 1) / warm
        done = (step - warm) / max(1, options.steps - warm)
        return options.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def save(self) -> None:
        """Write the state file: weights, the optimisers' moments, and the step, whole or not at all."""
        tensors = {f"weight.{name}": weight.detach() for name, weight in self.named.items()}
        tensors |= {f"{key}.{name}": moment for name, key, moment in self.optimizer.moments()}
        part = self.state_file.with_suffix(".part")
        state = self._identity(self.step)
        save_file({k: v.contiguous() for k, v in tensors.items()}, part, metadata={"state": state})
        os.replace(part, self.state_file)

    def resume(self) -> bool:
        """Go on from the state file, if there is one. Raises CheckpointError if it is another run's."""
        path = self.state_file
        if not path.exists():
            return False
        with safe_open(path, framework="pt", device=str(self.device)) as stream, torch.no_grad():
            found = json.loads(stream.metadata()["state"])
            for key, value in json.loads(self._identity(found["step"])).items():
                if found.get(key) != value:
                    raise CheckpointError(
                        f"{path}: {key}={found.get(key)}, expected {value}; resume with the options it was "
                        "started with, or choose another output folder"
                    )
            self.step = found["step"]
            for name, weight in self.named.items():
                weight.copy_(stream.get_tensor(f"weight.{name}"))
            if self.step:
                self.optimizer.restore(self.step, lambda name, key: stream.get_tensor(f"{key}.{name}"))
        return True

    def _feature_scale(self) -> Tensor:
        """1 / rms of every feature, float32 [m*d].

        Residual streams have a few huge dimensions, which would drown the others in `fc` for thousands of
        steps. Training sees scaled features; `result` folds the scale into fc, so checkpoints stay plain. A frozen
        backbone takes features as they come, so that its fc stays what it is to the last bit.
        """
        if self.options.freeze_backbone:
            return torch.ones(len(self.config.target_layer_ids) * self.config.hidden_size, device=self.device)
        batch = self.batches.at(0).to(self.device)
        features, _ = target_states(self.target, self.config.target_layer_ids, batch.tokens)
        real = torch.arange(features.shape[1], device=self.device) < batch.lengths.unsqueeze(1)
        real[:, 0] = False  # the first token is an attention sink, unlike all others
        rms = features[real].float().square().mean(0).sqrt()
        return 1 / rms.clamp(min=1e-6)

    def _identity(self, step: int) -> str:
        options = {k: v for k, v in asdict(self.options).items() if k not in ("every", "log_every", "compiled")}
        state = {
            "step": step, "options": options, "config": asdict(self.config), "texts": len(self.batches.texts),
        }  # fmt: skip
        return json.dumps(state)

    def _anchors(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed((self.options.seed * 1_000_003 + number) % 2**63)
        return draw_anchors(batch, self.options.anchors, generator)

    def _log(self, row: dict[str, Any]) -> None:
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def check_start(draft: BlockDraft, wanted: DraftConfig) -> None:
    """Raise CheckpointError unless training a draft of this configuration can start from this one.

    Its MLPs may be narrower, a DFlash draft may get DFlash 2's parts, and the number of candidates shapes no weight.
    """
    found = draft.config
    if found.own_embeddings or found.own_head:
        raise CheckpointError(
            f"--start-from {draft.name}: it has an embedding or a head of its own, expected none: a draft trains with "
            "the target's; give one that was exported without --layout deepspec"
        )
    if isinstance(wanted, DFlash2Config):
        if type(found) is DraftConfig:
            wanted = DraftConfig(**{part.name: getattr(wanted, part.name) for part in fields(DraftConfig)})
        elif isinstance(found, DFlash2Config) and found.selector_rank and wanted.selector_rank:
            wanted = replace(wanted, selector_top_k=found.selector_top_k)
    narrow = found.intermediate_size <= wanted.intermediate_size
    if not narrow or replace(found, intermediate_size=wanted.intermediate_size) != wanted:
        raise CheckpointError(
            f"--start-from {draft.name}: its configuration is {found}, expected {wanted}, of which intermediate_size "
            "may be larger; give the options that it was trained with"
        )


def initialise(module: Backbone, seed: int) -> None:
    """Normal weights of deviation 0.5 / sqrt(hidden_size), norms of one; the same for a seed everywhere.

    DFlash 2's parts do nothing yet: convolutions are the identity, and the selector adds zero.
    """
    generator = torch.Generator().manual_seed(seed)
    deviation = 0.5 / module.config.hidden_size**0.5
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith(("bias", "successor_codebook", "kernel_projection.weight")):
                weight.zero_()
            elif name.endswith("base_kernel"):
                weight.zero_()[:, 0] = 1
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)


def _means(stats: Sequence[StepStats]) -> dict[str, Any]:
    """Mean loss, and by position the accuracy, the target's probability of the guess and the overlap, over batches."""
    counts = torch.stack([s.counts for s in stats]).sum(0).clamp(min=1)
    row: dict[str, Any] = {"loss": float(torch.stack([s.loss for s in stats]).mean())}
    for name, key in (("accuracy", "hits"), ("target_probability", "mass"), ("overlap", "overlap")):
        means = torch.stack([getattr(s, key) for s in stats]).sum(0) / counts
        row[name] = [round(x, 4) for x in means.tolist()]
    return row
