"""DSpark's training: the loss against a loop, heads as in decoding, and a run from the command line."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from model_loaders import load_draft
from model_loaders.drafts.dspark import DSparkConfig, DSparkDraft, DSparkModule
from model_loaders.train_draft import main
from model_loaders.training.acceptance import count_rounds
from model_loaders.training.dataset import Batch, load_texts
from model_loaders.training.dspark import before_heads, heads
from model_loaders.training.loss import LossWeights, batch_loss
from model_loaders.training.trainer import initialise
from tests.test_train_draft import command, folder, target  # noqa: F401 (fixtures)

VOCAB, WIDTH, RANK, BLOCK = 11, 8, 3, 3
KINDS = {
    "vanilla": {"markov_rank": RANK, "confidence_head": True, "confidence_with_markov": True},
    "gated": {"markov_rank": RANK, "markov_head_type": "gated", "confidence_head": True},
    "rnn": {"markov_rank": RANK, "markov_head_type": "rnn", "confidence_head": True, "confidence_with_markov": True},
    "rank 0": {"confidence_head": True},
    "no confidence": {"markov_rank": RANK},
}


def make_module(kind):
    config = DSparkConfig(
        hidden_size=WIDTH, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        layer_types=("full_attention",), target_layer_ids=(0,), num_target_layers=3, block_size=BLOCK,
        mask_token_id=0, vocab_size=VOCAB, **KINDS[kind],
    )  # fmt: skip
    module = DSparkModule(config)
    initialise(module, 1)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "head" in name:
                weight.mul_(4).add_(0.1)
    return config, module


def slow_step(module, config, previous, hidden, state):
    """What the Markov head adds, the confidence's logit, and the next state, for one row."""
    w = dict(module.named_parameters())
    if not config.markov_rank:
        return (
            torch.zeros(VOCAB),
            hidden @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0],
            state,
        )
    embedded = latent = w["markov_head.markov_w1.weight"][previous]
    if config.markov_head_type == "gated":
        x = torch.cat([hidden, embedded])
        latent = torch.sigmoid(w["markov_head.gate_proj.weight"] @ x + w["markov_head.gate_proj.bias"]) * embedded
    if config.markov_head_type == "rnn":
        x = torch.cat([state, embedded, hidden])
        out = w["markov_head.joint_proj.weight"] @ x + w["markov_head.joint_proj.bias"]
        gate = torch.sigmoid(out[:RANK])
        state = gate * state + (1 - gate) * torch.tanh(out[RANK : 2 * RANK])
        latent = torch.tanh(out[2 * RANK :])
    confidence = None
    if config.confidence_head:
        features = torch.cat([hidden, embedded]) if config.confidence_with_markov else hidden
        confidence = features @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0]
    return w["markov_head.markov_w2.weight"] @ latent, confidence, state


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradients(kind):
    """Against a loop over anchors and drafts, with an end of text inside a block; logits in pieces."""
    config, module = make_module(kind)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, BLOCK, WIDTH, generator=generator, requires_grad=True)
    target_hidden = torch.randn(2, 10, WIDTH, generator=generator)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    tokens = torch.randint(0, VOCAB, (2, 10), generator=generator)
    batch = Batch(tokens, torch.tensor([10, 7]), torch.tensor([1, 1]), torch.ones(2))
    anchors, real = torch.tensor([[1, 5, 8], [2, 4, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    total, norm, counts = torch.zeros(()), 0.0, [0] * BLOCK
    for b in range(2):
        for a in range(3):
            state = torch.zeros(RANK)
            for k in range(BLOCK):
                at = int(anchors[b, a]) + k
                if not real[b, a] or at + 1 >= batch.lengths[b]:
                    continue
                row = hidden[b, a, k]
                bias, confidence, state = slow_step(module, config, batch.tokens[b, at], row, state)
                law = (head @ row + bias).softmax(-1)
                wanted = (head @ target_hidden[b, at]).softmax(-1)
                distance = (law - wanted).abs().sum()
                loss = 0.1 * -(wanted * law.log()).sum() + 0.9 * distance
                if confidence is not None:
                    kept, sure = 1 - distance.detach() / 2, torch.sigmoid(confidence)
                    loss = loss - (kept * sure.log() + (1 - kept) * (1 - sure).log())
                scale = float(torch.tensor(-k / 4.0).exp())
                total, norm, counts[k] = total + scale * loss, norm + scale, counts[k] + 1
    (total / norm).backward()
    expected = {name: w.grad for name, w in module.named_parameters() if w.grad is not None} | {"hidden": hidden.grad}
    module.zero_grad()
    hidden.grad = None
    weights = dict(module.named_parameters())
    at = (anchors[..., None] + torch.arange(BLOCK)).clamp(max=9)
    previous = batch.tokens[torch.arange(2)[:, None, None], at]
    for backward in (False, True):
        stats = batch_loss(
            before_heads(module, weights, hidden, previous), partial(heads, config, weights, lambda x: x @ head.T),
            lambda x: x @ head.T, target_hidden, batch, anchors, real, BLOCK, LossWeights(0.1, 0.9),
            backward=backward, rows_at_once=5,
        )  # fmt: skip
        torch.testing.assert_close(stats.loss, (total / norm).detach())
        assert stats.counts.tolist() == counts
    got = {name: w.grad for name, w in module.named_parameters() if w.grad is not None} | {"hidden": hidden.grad}
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_the_command_line_trains_a_dspark_draft(folder, target, tmp_path, capsys):  # noqa: F811
    """The loss falls; the draft loads, beats an untrained one and proposes draws."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"{word} {n}" for word in ("why", "how", "sum") for n in range(32)))
    output = tmp_path / "draft"
    options = ("--method", "dspark", "--markov-rank", "16", "--block-size", "3")
    assert main(command(folder, output, prompts, *options)) == 0
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    draft = load_draft(output, target)
    assert isinstance(draft, DSparkDraft)
    assert (draft.num_drafts, draft.has_confidence, draft.config.markov_rank) == (3, True, 16)
    report = json.loads((output / "acceptance.json").read_text())
    trained = report["results"]["greedy"]["tokens_per_round"]["held_out"]
    texts = load_texts(output / "training" / "texts.safetensors")
    asked = [text.tokens[: text.answer_start].tolist() for text in texts[:8]]
    untrained = DSparkDraft(DSparkModule(draft.config).eval(), target)
    assert trained > 0.2 + count_rounds(target, untrained, asked, max_new_tokens=12, temperature=0.0).tokens_per_round
    sampled = count_rounds(target, draft, asked, max_new_tokens=12, temperature=1.0, proposal="sample")
    assert sampled.tokens_per_round > 1.2
    # The finished run resumed to write DeepSpec's layout: the same draft with an embedding and a head of its own.
    assert json.loads((output / "config.json").read_text())["architectures"] == ["DSparkDraftModel"]
    assert main(command(folder, output, prompts, *options, "--resume", "--layout", "deepspec")) == 0
    assert json.loads((output / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]
    whole = load_draft(output, target)
    assert whole.config.own_embeddings
    assert whole.config.own_head
    again = count_rounds(target, whole, asked, max_new_tokens=12, temperature=0.0)
    once = count_rounds(target, draft, asked, max_new_tokens=12, temperature=0.0)
    assert again.tokens.tolist() == once.tokens.tolist()
    assert again.reached.tolist() == once.reached.tolist()
    # No training starts from it.
    capsys.readouterr()
    start = ("--start-from", str(output))
    assert main(command(folder, tmp_path / "more", prompts, *options, *start)) == 2
    assert "it has an embedding or a head of its own, expected none" in capsys.readouterr().err
    # The same run again, in the first one's place: refused, as its options differ.
    assert main(command(folder, output, prompts, "--method", "dspark", "--resume", "--markov-rank", "8")) == 2


def test_a_layout_is_chosen_for_dspark_only(folder, tmp_path, capsys):  # noqa: F811
    assert main(["--target", str(folder), "--output", str(tmp_path / "out"), "--layout", "deepspec"]) == 2
    assert "--layout=deepspec with --method dflash, expected dspark" in capsys.readouterr().err
