"""DFlash 2: dynamic convolutions around attention and MLP, and a selector that chains the candidates of each mask.

Source: z-lab's DFlash2DraftModel. On block rows only (context keys and values are not convolved), with c a channel
and g(c) its group:

    out[i, c] = sum_t (base[side, t, c] + delta[i, side, t, g(c)]) * x[i - t, c],    x = 0 before the block

One projection of the normed input of a sublayer gives delta for both sides: side 0 acts on that input, side 1 on the
sublayer's output before the residual is added.

Selector: the top-K logits of mask s are candidates with unary U_s. After the token a (the anchor for s = 0),

    S_s(a, b) = U_s(b) + sum_r A[a, r] (H h_s)[r] B[b, r]
    draft s ~ softmax(S_s(a, .) / temperature) on the candidates
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_loaders.drafts.backbone import AttendToOwn, Backbone, DraftConfig, Layer
from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.proposal import Drafted, Draw, ProposalLaw, pick, pick_in_turn


@dataclass(frozen=True)
class DFlash2Config(DraftConfig):
    """A backbone with convolutions of ``conv_kernel_size`` taps over groups of ``conv_group_size`` channels (0: none)
    and a selector of rank ``selector_rank`` over ``selector_top_k`` candidates (0: none)."""

    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0


class GroupedDynamicConv(nn.Module):
    """A causal convolution along the block on both sides of a sublayer; see the module docstring."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        d, self.taps, self.group = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.block_size = config.block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, d))
        self.kernel_projection = nn.Linear(d, 2 * self.taps * d // self.group, bias=False)

    def deltas(self, normed: Tensor) -> Tensor:
        """[b, w, 2, taps, d / group] of the sublayer's normed input [b, w, d]."""
        return self.kernel_projection(normed).unflatten(-1, (2, self.taps, -1))

    def forward(self, x: Tensor, deltas: Tensor, side: int) -> Tensor:
        """Rows x [b, w, d] of one block, or of several one behind another, convolved by one side's kernel."""
        kernels = self.base_kernel[side] + deltas[:, :, side].repeat_interleave(self.group, -1)
        blocks = x.unflatten(1, (-1, self.block_size))
        rows = [F.pad(blocks, (0, 0, t, 0))[:, :, : self.block_size].flatten(1, 2) for t in range(self.taps)]
        return (kernels * torch.stack(rows, 2)).sum(2)


class DFlash2Layer(Layer):
    """A backbone's layer between convolutions."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = GroupedDynamicConv(config), GroupedDynamicConv(config)

    def forward(self, x: Tensor, turns: Tensor, attend_to: AttendToOwn, mask: Tensor) -> Tensor:
        """See ``Layer.forward``."""
        normed = self.input_layernorm(x)
        deltas = self.attention_conv.deltas(normed)
        rows = self.self_attn(self.attention_conv(normed, deltas, 0), turns, attend_to, mask)
        x = x + self.attention_conv(self.self_attn.o_proj(rows), deltas, 1)
        normed = self.post_attention_layernorm(x)
        deltas = self.mlp_conv.deltas(normed)
        inner = self.mlp(self.mlp_conv(normed, deltas, 0))
        return x + self.mlp_conv(self.mlp.down_proj(inner), deltas, 1)


class CandidateSelector(nn.Module):
    """Scores of a mask's candidates after the token before; see the module docstring."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        rank, vocab_size = config.selector_rank, config.vocab_size or 0
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, candidates: Tensor, projected: Tensor, previous: Tensor) -> Tensor:
        """What the token before adds, float32 [b, K]: candidates int64 [b, K], projected [b, r], previous int64 [b]."""
        before = (self.predecessor_codebook[previous] * projected).float().unsqueeze(1)
        return (before * self.successor_codebook[candidates].float()).sum(-1)


class DFlash2Module(Backbone):
    """A backbone with DFlash 2's parts, under z-lab's names."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None

    @staticmethod
    def new_layer(config: DraftConfig) -> Layer:
        """See ``Backbone.new_layer``."""
        config = cast(DFlash2Config, config)
        return DFlash2Layer(config) if config.conv_kernel_size else Layer(config)


class DFlash2Draft(BlockDraft):
    """Proposes from left to right among each mask's candidates; sampled requests get drawn proposals.

    A drawn proposal's law has K entries, in ascending token id, and is zero elsewhere.
    """

    method = "dflash2"

    def propose_after(self, hidden: Tensor, anchors: Tensor, draw: Draw | None) -> Drafted:
        """See ``BlockDraft.propose_after``."""
        selector = cast(DFlash2Module, self.module).candidate_selector
        logits = self.logits(hidden)
        if selector is None:
            tokens = self.token_of(pick(logits, 0, draw))
            return Drafted(tokens, None if draw is None else self.law(logits))
        config = cast(DFlash2Config, self.config)
        candidates = logits.topk(min(config.selector_top_k, logits.shape[-1]), dim=-1).indices.sort(-1).values
        scores = logits.gather(-1, candidates).float()
        projected = selector.hidden_projection(hidden)

        def scores_of(k: int, previous: Tensor) -> Tensor:
            scores[:, k].add_(selector(candidates[:, k], projected[:, k], previous))
            return scores[:, k : k + 1]

        tokens = pick_in_turn(
            self.num_drafts,
            anchors,
            scores_of,
            lambda k, index: candidates[:, k].gather(1, index.unsqueeze(1)).squeeze(1),
            draw,
        )
        return Drafted(tokens, None if draw is None else ProposalLaw(scores, token_ids=candidates.int()))
