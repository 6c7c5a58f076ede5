"""Every method, loaded from a checkpoint in its own layout, against the slow oracle; and how proposals are drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gpu
from model_loaders import load_draft, save_draft
from model_loaders.drafts.dspark import DSparkDraft, DSparkModule
from model_loaders.drafts.proposal import ProposalLaw
from model_loaders.errors import CheckpointError
from pipeline.drafting.drawing import Drawing
from tests import naive_dflash, naive_drafts, pipes, tiny_drafts

VOCAB, WIDTH, LAYERS, BLOCK, MASK = 23, 16, 5, 4, 22
TAPS = (0, 2, 3)
ANCHORED = {"dspark vanilla", "dspark gated", "dspark rnn", "dspark rank 0", "specforge", "speculators dspark"} | {
    "speculators dspark gated", "speculators dflash whole",
}  # fmt: skip


def drawing(temperatures, uniforms):
    """The pipeline's draw, at these temperatures and nothing else; uniforms [b, D]."""

    def policy(rows):
        each = temperatures.numpy().repeat(rows)
        return each, np.zeros(each.size, np.int32), np.ones(each.size, np.float32), np.zeros(each.size, np.float32)

    return Drawing(policy, uniforms, "top_k_first")


def laws_of(draw, drafted):
    """The laws of what was drawn, float32 [b, D, VOCAB]."""
    return torch.from_numpy(gpu.dense_law(draw.law(drafted.law, VOCAB)))


def fake_target(vocab_size=VOCAB, dtype=torch.float32):
    """An embedding and a head: all that a draft borrows."""
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(vocab_size, WIDTH, generator=generator).to(dtype)
    head = (0.5 * torch.randn(vocab_size, WIDTH, generator=generator)).to(dtype)
    return SimpleNamespace(
        hidden_size=WIDTH, num_layers=LAYERS, vocab_size=vocab_size, device=torch.device("cpu"), dtype=dtype,
        embedding=embedding, head_weight=head, tokenizer=None,
        embed=lambda ids: embedding[ids], head=lambda hidden: hidden @ head.T,
    )  # fmt: skip


def load(tmp_path, kind, **options):
    target = fake_target()
    options = {"block_size": BLOCK, "mask_token_id": MASK, "layer_ids": TAPS} | options
    return load_draft(tiny_drafts.write(tmp_path, kind, target, **options), target)


def oracle(draft, folder, features, anchor, temperature, uniforms):
    """The oracle's proposal for one request, from the checkpoint's own tensors."""
    weights = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    target, config, parts = draft.target, draft.config, tiny_drafts.KINDS[draft.kind][1]
    embedding = weights.get("embed_tokens.weight", target.embedding.double())
    hidden = naive_dflash.block_hidden(
        weights, features.double(), embedding[[anchor] + [MASK] * (BLOCK - 1)],
        num_heads=2, num_kv_heads=1, head_dim=8,
        inverse_frequencies=naive_dflash.plain_frequencies(8, 10000.0),
        layer_kinds=[(config.is_causal(i), config.window(i)) for i in range(2)],
    )  # fmt: skip
    if draft.kind not in ANCHORED:
        hidden = hidden[1:]
    tokens_of = list(range(VOCAB))
    if "d2t" in weights:
        tokens_of = [i + int(offset) for i, offset in enumerate(weights["d2t"])]
    logits = hidden @ weights.get("lm_head.weight", target.head_weight[tokens_of].double()).T
    if "selector" in parts:
        tokens, laws, nearest = naive_drafts.select(
            weights, parts["selector"][1], logits, hidden, anchor, temperature, uniforms
        )
        return tokens, laws, [], nearest
    tokens, laws, confidences, nearest = naive_drafts.dspark(
        weights, parts.get("markov", "vanilla"), logits, hidden, anchor, temperature, uniforms,
        parts.get("with_markov", False), tokens_of,
    )  # fmt: skip
    whole = []
    for law in laws:
        whole.append(torch.zeros(VOCAB, dtype=torch.float64))
        for index, probability in enumerate(law):
            whole[-1][tokens_of[index]] = probability
    return tokens, whole, confidences, nearest


@pytest.mark.parametrize("kind", tiny_drafts.KINDS)
def test_proposals_equal_the_oracle(tmp_path, kind):
    """Rows of different lengths and temperatures, greedy among them, over three rounds with rejected rows left over."""
    draft = load(tmp_path, kind)
    draft.kind = kind
    generator = torch.Generator().manual_seed(3)
    width = len(TAPS) * WIDTH
    assert draft.num_drafts == (BLOCK if kind in ANCHORED else BLOCK - 1)
    assert draft.has_confidence == bool(tiny_drafts.KINDS[kind][1].get("confidence"))
    lengths, temperatures = [3, 7, 1], torch.tensor([1.0, 0.0, 0.6])
    cache = draft.new_cache(3, 32)
    prompt = torch.randn(3, max(lengths), width, generator=generator)
    draft.extend(prompt, torch.arange(max(lengths)).expand(3, -1), cache)
    kept = [prompt[row, :n] for row, n in enumerate(lengths)]
    compared = 0
    for _ in range(3):
        starts = torch.tensor([len(rows) for rows in kept])
        anchors = torch.randint(0, VOCAB - 1, (3,), generator=generator)
        uniforms = torch.rand(3, draft.num_drafts, generator=generator, dtype=torch.float64)
        draw = drawing(temperatures, uniforms)
        drafted = draft.propose(anchors, starts, cache, draw=draw)
        laws = laws_of(draw, drafted)
        chosen = draft.propose(anchors, starts, cache)
        assert chosen.law is None
        assert chosen.tokens[1].tolist() == drafted.tokens[1].tolist()
        for row in range(3):
            anchor, temperature = int(anchors[row]), float(temperatures[row])
            tokens, expected, confidences, nearest = oracle(
                draft, tmp_path, kept[row], anchor, temperature, uniforms[row].tolist()
            )
            if nearest < 1e-5:
                continue  # the uniform lies on an edge
            compared += 1
            assert drafted.tokens[row].tolist() == tokens
            torch.testing.assert_close(laws[row].double(), torch.stack(expected), atol=3e-6, rtol=1e-4)
            if confidences:
                wanted = torch.tensor(confidences, dtype=torch.float64)
                torch.testing.assert_close(drafted.confidence()[row].double(), wanted, atol=1e-5, rtol=1e-4)
            else:
                assert drafted.confidence is None
        features = torch.randn(3, draft.num_drafts + 1, width, generator=generator)
        draft.extend(features, starts[:, None] + torch.arange(draft.num_drafts + 1), cache)
        for row in range(3):
            accepted = int(torch.randint(0, draft.num_drafts + 1, (), generator=generator))
            kept[row] = torch.cat([kept[row], features[row, : accepted + 1]])
    assert compared >= 6


def test_a_rows_proposal_depends_on_itself_only(tmp_path):
    """Beside neighbours or alone, drawn or beside chosen ones: bit for bit."""
    for kind in ("dspark rnn", "dflash2", "speculators dspark"):
        draft = load(tmp_path / kind, kind)
        generator = torch.Generator().manual_seed(5)
        features = torch.randn(3, 6, len(TAPS) * WIDTH, generator=generator)
        anchors, starts = torch.tensor([4, 5, 6]), torch.tensor([6, 4, 5])
        uniforms = torch.rand(3, draft.num_drafts, generator=generator, dtype=torch.float64)
        cache = draft.new_cache(3, 16)
        draft.extend(features, torch.arange(6).expand(3, -1), cache)
        draw = drawing(torch.tensor([0.7, 1.2, 0.0]), uniforms)
        together = draft.propose(anchors, starts, cache, draw=draw, kv_length=12)
        for row, temperature in enumerate([0.7, 1.2, 0.0]):
            own = drawing(torch.tensor([temperature]), uniforms[row : row + 1])
            alone = draft.propose(
                anchors[row : row + 1], starts[row : row + 1], cache, [row], draw=own, kv_length=12
            )  # fmt: skip
            assert alone.tokens[0].tolist() == together.tokens[row].tolist()
            assert torch.equal(laws_of(own, alone)[0], laws_of(draw, together)[row])


@pytest.mark.parametrize("kind", tiny_drafts.KINDS)
def test_a_proposal_reads_nothing_back(tmp_path, kind):
    """On the meta device there are shapes but no numbers: whatever would bring one to the host fails.

    So a chain can be captured in a CUDA graph: no branch, no shape and no index of it depends on a token.
    """
    draft = load(tmp_path, kind)
    draft.module.to("meta")
    embedding, head = (torch.empty(VOCAB, WIDTH, device="meta") for _ in range(2))
    draft.target.embed, draft.target.head = (lambda ids: embedding[ids]), (lambda hidden: hidden @ head.T)
    hidden = torch.empty(2, draft.num_drafts, WIDTH, device="meta")
    anchors = torch.empty(2, dtype=torch.int64, device="meta")
    drafted = draft.propose_after(hidden, anchors, lambda logits, k: logits.argmax(-1))
    assert drafted.tokens.shape == (2, draft.num_drafts)
    assert drafted.law.dense(drafted.law.logits, VOCAB).shape == (2, draft.num_drafts, VOCAB)
    assert draft.propose_after(hidden, anchors, None).tokens.shape == (2, draft.num_drafts)


def test_a_sparse_law_made_dense():
    probs = torch.tensor([[[0.25, 0.75]]])
    among = ProposalLaw(probs, token_ids=torch.tensor([[[1, 3]]], dtype=torch.int32))
    assert among.dense(probs, 5).tolist() == [[[0.0, 0.25, 0.0, 0.75, 0.0]]]
    narrow = ProposalLaw(probs, entry_of=torch.tensor([-1, 0, -1, 1, -1], dtype=torch.int32))
    assert narrow.dense(probs, 5).tolist() == [[[0.0, 0.25, 0.0, 0.75, 0.0]]]


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dflash2 selector only", "dspark gated", "dspark rank 0",
     "specforge", "specforge borrowed"])  # fmt: skip
def test_round_trips(tmp_path, kind):
    draft = load(tmp_path / "given", kind)
    save_draft(tmp_path / "saved", draft)
    found = load_draft(tmp_path / "saved", draft.target)
    assert type(found) is type(draft)
    assert found.config == draft.config
    for name, tensor in draft.module.state_dict().items():
        assert torch.equal(found.module.state_dict()[name], tensor)


@pytest.mark.parametrize("kind", ["speculators dflash", "speculators dspark", "speculators dflash whole"])
def test_what_a_layout_cannot_hold_is_not_written(tmp_path, kind):
    with pytest.raises(CheckpointError, match="can't hold it"):
        save_draft(tmp_path / "saved", load(tmp_path / "given", kind))
    assert not (tmp_path / "saved").exists()


def borrowing(folder, target):
    """A random DSpark draft that borrows embedding and head of a real target."""
    owner = load_draft(tiny_drafts.write(folder, "dspark vanilla", target), target)
    module = DSparkModule(replace(owner.config, own_embeddings=False, own_head=False))
    module.load_state_dict({name: t for name, t in owner.module.state_dict().items() if name in module.state_dict()})
    return DSparkDraft(module.eval(), target)


def proposed(draft):
    """Drafts and confidences behind a few tokens."""
    generator, cache = torch.Generator().manual_seed(4), draft.new_cache(2, 16)
    features = torch.randn(2, 5, draft.module.fc.in_features, generator=generator)
    draft.extend(features, torch.arange(5).expand(2, -1), cache)
    drafted = draft.propose(torch.tensor([7, 8]), torch.tensor([5, 4]), cache)
    return drafted.tokens.tolist(), drafted.confidence().tolist()


@pytest.mark.parametrize(("arch", "tie"), [("llama", False), ("llama", True), ("gemma", True)])
@pytest.mark.parametrize("as_int8", [False, True])
def test_deepspecs_layout_holds_copies_of_what_a_draft_borrows(tmp_path, arch, tie, as_int8):
    """The target's embedding (gemma's is scaled) and head; the same drafts and confidences, to the bit without int8."""
    target = pipes.target(64, arch, tie=tie)
    borrows = borrowing(tmp_path / "given", target)
    save_draft(tmp_path / "a", borrows, layout="specforge", int8=as_int8)
    save_draft(tmp_path / "b", borrows, layout="deepspec", int8=as_int8)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (written["architectures"], written["vocab_size"]) == (["Qwen3DSparkModel"], 64)
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in "ab"]
    assert {name.removesuffix("_scale") for name in names[1] - names[0]} == {"embed_tokens.weight", "lm_head.weight"}
    one, other = (load_draft(tmp_path / folder, target) for folder in "ab")
    assert (one.config.own_head, other.config.own_head, other.config.own_embeddings) == (False, True, True)
    ids, hidden = torch.arange(64), torch.randn(2, 3, one.config.hidden_size)
    close = {"atol": 0.05, "rtol": 0.05} if as_int8 else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(other.embed(ids), one.embed(ids), **close)
    torch.testing.assert_close(other.logits(hidden), one.logits(hidden), **close)
    if not as_int8:
        assert proposed(one) == proposed(other)
    save_draft(tmp_path / "c", other)  # what it brings now is its own
    assert load_draft(tmp_path / "c", target).config == other.config


def test_layouts_that_a_draft_cannot_have(tmp_path):
    with pytest.raises(CheckpointError, match="layout='deepspec', expected None for a draft of method dflash"):
        save_draft(tmp_path / "saved", load(tmp_path / "a", "dflash"), layout="deepspec")
    with pytest.raises(CheckpointError, match="layout='zlab', expected one of specforge, deepspec for a draft"):
        save_draft(tmp_path / "saved", load(tmp_path / "b", "specforge"), layout="zlab")
    for number, kind in enumerate(["specforge borrowed", "speculators dspark"]):
        with pytest.raises(CheckpointError, match="the layout of Qwen3DSparkModel can't hold it"):
            save_draft(tmp_path / "saved", load(tmp_path / f"c{number}", kind), layout="deepspec")
    biased = borrowing(tmp_path / "d", pipes.target(64))
    head = torch.nn.Linear(8, 64)
    biased.target = SimpleNamespace(
        name="biased", vocab_size=64, device="cpu", embed=biased.target.embed,
        model=SimpleNamespace(get_output_embeddings=lambda: head),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="the head of its target biased adds a bias, expected none"):
        save_draft(tmp_path / "saved", biased, layout="deepspec")
    assert not (tmp_path / "saved").exists()


def test_scaled_logits_and_embeddings(tmp_path):
    """Multiplied, soft-capped, and blocks embedded at a scale."""
    plain = load(tmp_path / "a", "dflash")
    extra = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0, "input_embedding_scale": 3.0}
    scaled = load(tmp_path / "b", "dflash", **extra)
    hidden = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(scaled.logits(hidden), 2 * torch.tanh(plain.logits(hidden) * 0.5 / 2))
    assert torch.equal(scaled.embed(torch.tensor([4])), 3 * plain.embed(torch.tensor([4])))
