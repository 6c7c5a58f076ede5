"""What is measured: shapes, settings, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

WIDTH = 8
L2_BYTES = 64 << 20  # at least the cache of the cards this is for
CAPACITY = 4096  # entries of a row's support that the filter stores
MAX_SUPPORT = 32_768
KEEP = 0.75
LIKELY, TAIL = 64, 0.01  # of a peaked row
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """A round's logits."""

    batch: int
    vocabulary: int
    dtype: str
    peaked: bool = False  # most of a row's mass lies on few tokens

    @property
    def rows(self) -> int:
        return self.batch * WIDTH

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.vocabulary} {self.dtype}{' peaked' if self.peaked else ''}"

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocabulary * _DTYPES[self.dtype].itemsize

    @property
    def num_sets(self) -> int:
        """How many input sets it takes to be twice the cache."""
        return max(8, -(-2 * L2_BYTES // self.logits_bytes))


@dataclass(frozen=True)
class Setting:
    """A filter; top_k 0 is none."""

    top_k: int
    top_p: float

    @property
    def unfiltered(self) -> bool:
        return self.top_k == 0 and self.top_p == 1

    @property
    def name(self) -> str:
        return f"k={self.top_k or 'none'}, p={self.top_p:g}"


_FLAT = tuple(
    Shape(batch, vocabulary, dtype)
    for dtype, batches in (("bfloat16", (32, 1)), ("bfloat16", (8,)), ("float32", (32, 1)), ("float32", (8,)))
    for vocabulary in (248_320, 151_936)
    for batch in batches
)
# The first that are asked about first: a run can be cut short.
SHAPES = (_FLAT[0], Shape(32, 248_320, "bfloat16", peaked=True), *_FLAT[1:])
SETTINGS = tuple(Setting(k, p) for p in (0.95, 1.0) for k in (1024, 256, 50, 0))
QUICK_SHAPES = tuple(shape for shape in _FLAT if shape.vocabulary == 248_320 and shape.dtype == "bfloat16")[:2]
QUICK_SETTINGS = SETTINGS[:3]


def against_peers(shape: Shape) -> bool:
    """Whether the peers run too."""
    return not shape.peaked


@dataclass(frozen=True)
class Inputs:
    """One input set, on the device."""

    logits: torch.Tensor  # bfloat16 or float32 [B, W, V]
    drafts: torch.Tensor  # int32 [B, W-1]
    keep: torch.Tensor  # bool [B, W]: whether row i's draft is to be kept
    accept: torch.Tensor  # float64 [B, W]: coins to that effect
    draw: torch.Tensor  # float64 [B, W]


def make_inputs(shape: Shape, seed: int, device: str = "cuda") -> Inputs:
    """Logits N(0, 3) or peaked, argmax drafts, coins."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, WIDTH, shape.vocabulary)
    logits = torch.randn(size, device=device, generator=generator)
    logits = peaked(logits, generator, TAIL) if shape.peaked else logits * 3
    logits = logits.to(_DTYPES[shape.dtype])
    coins = np.random.default_rng(seed)
    keep = coins.random((shape.batch, WIDTH)) < KEEP
    accept = np.where(keep, 0.0, 1 - 2.0**-53)  # of a support of more than one token the latter is refused
    return Inputs(
        logits,
        logits[:, :-1].argmax(-1).to(torch.int32),
        torch.from_numpy(keep).to(device),
        torch.from_numpy(accept).to(device),
        torch.from_numpy(coins.random((shape.batch, WIDTH))).to(device),
    )


def peaked(normal: torch.Tensor, generator: torch.Generator, tail: float) -> torch.Tensor:
    """Logits as a language model's often are, of normal numbers [..., V], which it overwrites.

    LIKELY tokens at 20 - Exp(2), and below them the others, N(., 2.5), which weigh `tail` of the row.
    """
    size = (*normal.shape[:-1], LIKELY)
    likely = torch.randint(normal.shape[-1], size, device=normal.device, generator=generator)
    head = 20 + 2 * torch.rand(size, device=normal.device, generator=generator).clamp(min=1e-6).log()
    normal *= 2.5
    odds = np.log(tail / (1 - tail))
    normal += head.logsumexp(-1, keepdim=True) + odds - normal.logsumexp(-1, keepdim=True)
    return normal.scatter_(-1, likely, head)
