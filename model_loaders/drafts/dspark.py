"""DSpark: a block of parallel logits, corrected from left to right by a small Markov head.

Source: DeepSpec's DSpark. Row k of the block proposes the token behind it (sample from anchor), so a block of
gamma rows proposes gamma drafts. With U_k row k's logits, h_k its hidden state, e = W1[x_{k-1}] the embedding of the
token before draft k (x_{-1} the anchor), r the rank:

    vanilla   bias = W2 e
    gated     bias = W2 (sigmoid(gate_proj [h_k; e]) * e)
    rnn       gate, candidate, out = joint_proj [s; e; h_k];  s' = sigmoid(gate) s + (1 - sigmoid(gate)) tanh(candidate)
              bias = W2 tanh(out), from s = 0
    draft k ~ softmax((U_k + bias) / temperature);    confidence c_k = sigmoid(proj [h_k; e])

c_k sees the tokens before draft k only. Rank 0 has no Markov head: drafts don't see one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from model_loaders.drafts.backbone import Backbone, DraftConfig
from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.proposal import Drafted, Draw, ProposalLaw, pick, pick_in_turn

VANILLA, GATED, RNN = MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(DraftConfig):
    """A backbone with a Markov head of rank ``markov_rank`` (0: none) and, if asked for, a confidence head.

    confidence_with_markov: the confidence head also sees the embedding of the token before.
    """

    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str = VANILLA
    confidence_head: bool = False
    confidence_with_markov: bool = False


class MarkovHead(nn.Module):
    """What the token before a draft adds to its logits; see the module docstring."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, d, vocab_size = config.markov_rank, config.hidden_size, config.vocab_size or 0
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or vocab_size, bias=False)
        if self.kind == GATED:
            self.gate_proj = nn.Linear(d + rank, rank)
        if self.kind == RNN:
            self.joint_proj = nn.Linear(2 * rank + d, 3 * rank)

    def forward(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 takes, [..., r], and the next state [..., r], after embedded [..., r] at hidden [..., d]."""
        if self.kind == GATED:
            embedded = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1))) * embedded
        elif self.kind == RNN:
            gate, candidate, out = self.joint_proj(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            embedded = torch.tanh(out)
        return embedded, state


class ConfidenceHead(nn.Module):
    """The draft's guess, as a logit, that a draft is accepted if all before it are."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [...] of features [..., width]."""
        return self.proj(features).squeeze(-1)


class DSparkModule(Backbone):
    """A backbone with DSpark's heads, under DeepSpec's names."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(width) if config.confidence_head else None


class DSparkDraft(BlockDraft):
    """Proposes from left to right, each draft after the one before it; sampled requests get drawn proposals."""

    method = "dspark"

    @property
    def has_confidence(self) -> bool:
        """Whether the checkpoint has a confidence head."""
        return cast(DSparkConfig, self.config).confidence_head

    def propose_after(self, hidden: Tensor, anchors: Tensor, draw: Draw | None) -> Drafted:
        """See ``BlockDraft.propose_after``."""
        module, config = cast(DSparkModule, self.module), cast(DSparkConfig, self.config)
        markov, logits = module.markov_head, self.logits(hidden)
        if markov is None:
            tokens = self.token_of(pick(logits, 0, draw))
            return Drafted(tokens, self._law(logits, draw), self._confidence(hidden, []))
        logits = logits.float()
        state = hidden.new_zeros(hidden.shape[0], config.markov_rank)
        embeddings: list[Tensor] = []

        def logits_of(k: int, previous: Tensor) -> Tensor:
            nonlocal state
            embeddings.append(markov.markov_w1(previous))
            latent, state = markov(embeddings[k], hidden[:, k], state)
            logits[:, k].add_(markov.markov_w2(latent))
            return logits[:, k : k + 1]

        tokens = pick_in_turn(self.num_drafts, anchors, logits_of, lambda k, index: self.token_of(index), draw)
        return Drafted(tokens, self._law(logits, draw), self._confidence(hidden, embeddings))

    def _law(self, logits: Tensor, draw: Draw | None) -> ProposalLaw | None:
        return None if draw is None else self.law(logits)

    def _confidence(self, hidden: Tensor, embeddings: list[Tensor]) -> Callable[[], Tensor] | None:
        """What ``Drafted`` says, of hidden [b, D, d] and the embeddings [b, r] of the tokens before the drafts."""
        head = cast(DSparkModule, self.module).confidence_head
        if head is None:
            return None
        with_markov = cast(DSparkConfig, self.config).confidence_with_markov

        @torch.inference_mode()
        def confidence() -> Tensor:
            features = torch.cat((hidden, torch.stack(embeddings, 1)), -1) if with_markov else hidden
            return torch.sigmoid(head(features).float())

        return confidence
