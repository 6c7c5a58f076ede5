"""DFlash 2's training: the loss against a loop, a start that is the DFlash draft, a frozen backbone, and whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from model_loaders import load_draft
from model_loaders.drafts.backbone import DraftConfig
from model_loaders.drafts.dflash2 import DFlash2Config, DFlash2Draft, DFlash2Module
from model_loaders.errors import CheckpointError
from model_loaders.train_draft import export, main
from model_loaders.training.acceptance import count_rounds
from model_loaders.training.blocks import block_hidden
from model_loaders.training.dataset import Batch, Text, load_texts
from model_loaders.training.dflash2 import before_heads, compare_candidates, compiled_compare_candidates, heads
from model_loaders.training.loss import LossWeights, batch_loss
from model_loaders.training.trainer import Trainer, TrainingOptions, check_start
from tests import tiny_drafts
from tests.test_train_draft import command, folder, target  # noqa: F401 (fixtures)

VOCAB, WIDTH, RANK, TOP_K = 11, 8, 3, 4
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")


def oracle(hidden, target_hidden, head, weights, batch, anchors, real, unary, decay=4.0):
    """Loss, mean overlap by position and the count of tokens outside the candidates, draft by draft in float64."""
    total, norm, overlaps, outside = torch.zeros((), dtype=torch.float64), 0.0, [[], [], []], 0
    before, after, projection = weights
    for b in range(anchors.shape[0]):
        temperature = float(batch.temperatures[b])
        for a in range(anchors.shape[1]):
            for k in range(3):
                at = int(anchors[b, a]) + k  # the token before the draft
                if not real[b, a] or at + 1 >= int(batch.lengths[b]):
                    continue
                token = int(batch.tokens[b, at + 1])
                if temperature:
                    wanted = torch.softmax(head @ target_hidden[b, at] / temperature, 0)
                else:
                    wanted = torch.zeros(VOCAB, dtype=torch.float64)
                    wanted[token] = 1
                divisor = temperature or 1.0
                logits = head @ hidden[b, a, k]
                plain = torch.log_softmax(logits / divisor, 0)
                alone = 0.1 * -(wanted * plain).sum() + 0.9 * (plain.exp() - wanted).abs().sum()
                chosen = logits.detach().argsort(descending=True)[:TOP_K].tolist()
                code = before[int(batch.tokens[b, at])] * (projection @ hidden[b, a, k])
                scores = torch.stack([logits[c] + (code * after[c]).sum() for c in chosen])
                logs = torch.log_softmax(scores / divisor, 0)
                cross, distance = 0.0, 0.0
                for c in range(VOCAB):
                    if c in chosen:
                        log = logs[chosen.index(c)]
                        cross, distance = cross - wanted[c] * log, distance + (log.exp() - wanted[c]).abs()
                    else:
                        distance = distance + wanted[c]
                outside += token not in chosen
                overlaps[k].append(float(1 - distance.detach() / 2))
                scale = float(torch.tensor(-k / decay).exp())
                total = total + scale * (unary * alone + (1 - unary) * (0.1 * cross + 0.9 * distance))
                norm += scale
    return total / norm, overlaps, outside


@pytest.mark.parametrize(("unary", "compiled"), [(0.0, False), (0.3, False), (1.0, False), (0.3, True)])
def test_the_loss_and_its_gradients(unary, compiled):
    """Against a loop over anchors and drafts in float64: a greedy text and a sampled one, tokens that aren't
    candidates, an end of text inside a block; in pieces."""
    generator = torch.Generator().manual_seed(4)
    made = partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden, target_hidden, head = made(2, 3, 3, WIDTH), made(2, 10, WIDTH), made(VOCAB, WIDTH)
    weights = [made(VOCAB, RANK), made(VOCAB, RANK), made(RANK, WIDTH)]
    tokens = torch.randint(0, VOCAB, (2, 10), generator=generator)
    batch = Batch(tokens, torch.tensor([10, 7]), torch.tensor([1, 1]), torch.tensor([0.0, 0.7]))
    anchors, real = torch.tensor([[1, 5, 8], [2, 4, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    leaves = [hidden.requires_grad_(), *(weight.requires_grad_() for weight in weights)]
    expected, overlaps, outside = oracle(hidden, target_hidden, head, weights, batch, anchors, real, unary)
    assert 0 < outside < sum(map(len, overlaps))
    gradients = torch.autograd.grad(expected, leaves, allow_unused=True)

    own = [leaf.detach().float().requires_grad_() for leaf in leaves]
    named = {f"candidate_selector.{name}": weight for name, weight in zip(SELECTOR, own[1:], strict=True)}
    config = tiny_config(vocab_size=VOCAB, hidden_size=WIDTH, selector_rank=RANK, selector_top_k=TOP_K)
    small = head.float()
    previous = tokens[torch.arange(2)[:, None, None], (anchors[..., None] + torch.arange(3)).clamp(max=9)]
    choosing = compiled_compare_candidates() if compiled else compare_candidates
    for backward in (False, True):
        stats = batch_loss(
            before_heads(named, own[0], previous), partial(heads, config, named, lambda x: x @ small.T),
            lambda x: x @ small.T, target_hidden.float(), batch, anchors, real, 3,
            LossWeights(0.1, 0.9, unary=unary), backward=backward, choosing=choosing, rows_at_once=5,
        )  # fmt: skip
        torch.testing.assert_close(stats.loss, expected.detach().float())
        torch.testing.assert_close(stats.overlap, torch.tensor([sum(row) for row in overlaps]))
        assert stats.counts.tolist() == [len(row) for row in overlaps]
    for leaf, gradient in zip(own, gradients, strict=True):
        wanted = torch.zeros_like(leaf) if gradient is None else gradient.float()
        torch.testing.assert_close(leaf.grad, wanted, atol=1e-5, rtol=1e-4)


def tiny_config(**fields):
    shape = {
        "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
        "layer_types": ("full_attention",), "target_layer_ids": (0,), "num_target_layers": 3, "block_size": 4,
        "mask_token_id": 0,
    }  # fmt: skip
    return DFlash2Config(**(shape | fields))


@pytest.fixture
def dflash(target, tmp_path):  # noqa: F811
    """A random DFlash draft."""
    return load_draft(tiny_drafts.write(tmp_path / "dflash", "dflash", target, layer_ids=(0, 2)), target)


def make_trainer(target, dflash, folder, options=None, **parts):  # noqa: F811
    """A trainer of twelve random texts, started from the draft."""
    generator = torch.Generator().manual_seed(3)
    texts = [
        Text(torch.randint(0, 250, (16,), generator=generator, dtype=torch.int32), 3, (0.0, 1.0)[i % 2])
        for i in range(12)
    ]
    config = DFlash2Config(**vars(dflash.config), **({"selector_rank": 3, "selector_top_k": 5} | parts))
    options = options or TrainingOptions(freeze_backbone=True)
    options = replace(options, steps=4, batch=4, anchors=3, length=16, learning_rate=1e-2, loss=LossWeights(0.1, 0.9))
    trainer = Trainer(target, config, texts[4:], texts[:4], options, folder)
    trainer.start_from(dflash)
    return trainer


CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 4}


@pytest.mark.parametrize(("frozen", "parts"), [(True, {}), (False, {}), (False, CONVOLUTIONS)])
def test_it_starts_as_the_dflash_draft(target, dflash, tmp_path, frozen, parts):  # noqa: F811
    """The same drafts from the same logits, frozen to the last bit (else the features' scale rounds fc)."""
    trainer = make_trainer(target, dflash, tmp_path, TrainingOptions(freeze_backbone=frozen), **parts)
    started = DFlash2Draft(trainer.result().eval(), target)
    generator = torch.Generator().manual_seed(1)
    features, anchors = torch.randn(3, 9, 2 * target.hidden_size, generator=generator), torch.tensor([5, 6, 7])
    starts, positions = torch.tensor([9, 4, 7]), torch.arange(9).expand(3, -1)
    hidden, caches = [], [draft.new_cache(3, 32) for draft in (dflash, started)]
    for draft, cache in zip((dflash, started), caches, strict=True):
        draft.extend(features, positions, cache)
        hidden.append(draft.hidden(anchors, starts, cache))
    torch.testing.assert_close(*hidden, **({"atol": 0, "rtol": 0} if frozen and not parts else {}))
    drafted = started.propose(anchors, starts, caches[1], draw=lambda logits, k: logits.argmax(-1))
    assert torch.equal(drafted.tokens, dflash.propose(anchors, starts, caches[0]).tokens)
    logits = started.logits(hidden[1])
    assert torch.equal(drafted.law.logits, logits.gather(-1, drafted.law.token_ids.long()))
    left = logits.scatter(-1, drafted.law.token_ids.long(), -torch.inf)
    assert (drafted.law.logits.amin(-1) >= left.amax(-1)).all()


def test_a_frozen_backbone_stays(target, dflash, tmp_path):  # noqa: F811
    """The optimiser has the selector's tensors alone; all of them move, and nothing else does."""
    trainer = make_trainer(target, dflash, tmp_path)
    before = {name: weight.clone() for name, weight in trainer.result().state_dict().items()}
    assert trainer.train()
    assert {name for name, _, _ in trainer.optimizer.moments()} == {f"candidate_selector.{name}" for name in SELECTOR}
    for name, weight in trainer.result().state_dict().items():
        assert torch.equal(weight, before[name]) != name.startswith("candidate_selector."), name
        if name in dflash.module.state_dict():
            assert torch.equal(weight, dflash.module.state_dict()[name]), name


@pytest.mark.parametrize("frozen", [True, False])
def test_resumed_training_is_the_same(target, dflash, tmp_path, frozen):  # noqa: F811
    options = TrainingOptions(freeze_backbone=frozen)
    whole = make_trainer(target, dflash, tmp_path / "whole", options)
    whole.train()
    make_trainer(target, dflash, tmp_path / "halves", options).train(until=2)
    again = make_trainer(target, dflash, tmp_path / "halves", options)
    assert again.resume()
    assert again.step == 2
    again.train()
    for name, weight in whole.result().state_dict().items():
        assert torch.equal(again.result().state_dict()[name], weight), name


@pytest.mark.parametrize("parts", [{}, CONVOLUTIONS])
@pytest.mark.parametrize("int8", [False, True])
def test_it_is_exported_in_z_labs_layout(target, dflash, tmp_path, parts, int8):  # noqa: F811
    """Under the published names; as int8, each row is off by half a step of its scale at most."""
    trainer = make_trainer(target, dflash, tmp_path, TrainingOptions(), **parts)
    trainer.train()
    export(trainer, int8)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["dflash_config"].items() >= {"selector_rank": 3, "selector_top_k": 5}.items() | parts.items()
    found = load_draft(tmp_path, target)
    assert found.config == trainer.config
    for name, weight in trainer.result().state_dict().items():
        step = weight.abs().amax(-1, keepdim=True) / 127 if int8 and weight.ndim == 2 else torch.zeros(())
        assert ((found.module.state_dict()[name] - weight).abs() <= 0.51 * step).all(), name
    # Written again, an int8 draft is what it was.
    if int8:
        trainer.start_from(found)
        export(trainer, True)
        for name, weight in load_draft(tmp_path, target).module.state_dict().items():
            torch.testing.assert_close(weight, found.module.state_dict()[name], atol=0, rtol=1e-6)


@pytest.mark.parametrize("kind", ["dflash2", "dflash2 selector only"])
def test_training_sees_what_decoding_does(target, tmp_path, kind):  # noqa: F811
    """Every anchor's block in one forward has the hidden states of decoding, and its law after the same tokens."""
    path = tiny_drafts.write(tmp_path, kind, target, layer_ids=(0, 2))
    draft = load_draft(path, target)
    module = DFlash2Module(draft.config)
    module.load_state_dict(draft.module.state_dict())
    generator = torch.Generator().manual_seed(5)
    length, anchors = 12, torch.tensor([[1, 4, 5, 8], [2, 3, 6, 8]])
    features = torch.randn(2, length, 2 * target.hidden_size, generator=generator)
    tokens = torch.randint(0, 250, (2, length), generator=generator)
    ids = torch.full((2, 4, draft.block_size), draft.mask_token_id)
    ids[..., 0] = tokens.gather(1, anchors)
    hidden = block_hidden(module, target.embed(ids), features, anchors)[:, :, 1:]
    previous = tokens[torch.arange(2)[:, None, None], anchors[..., None] + torch.arange(draft.num_drafts)]
    weights = dict(module.named_parameters())
    rows = [part.flatten(0, 2) for part in before_heads(weights, hidden, previous)]
    made = heads(draft.config, weights, target.head, rows)
    order = made.candidates.argsort(1)
    scores = (made.logits.gather(1, made.candidates) + made.added).gather(1, order).view(2, 4, draft.num_drafts, -1)
    candidates = made.candidates.gather(1, order).view_as(scores)
    for row in range(2):
        for column in range(4):
            anchor = int(anchors[row, column])
            cache = draft.new_cache(1, 32)
            draft.extend(features[row : row + 1, :anchor], torch.arange(anchor)[None], cache)
            start = tokens[row, anchor : anchor + 1], torch.tensor([anchor])
            torch.testing.assert_close(draft.hidden(*start, cache)[0], hidden[row, column], atol=1e-4, rtol=1e-4)
            text = tokens[row, anchor + 1 : anchor + 1 + draft.num_drafts]
            law = forced(draft, draft.hidden(*start, cache), start[0], text)
            assert torch.equal(law.token_ids[0].long(), candidates[row, column])
            torch.testing.assert_close(law.logits[0], scores[row, column], atol=1e-4, rtol=1e-4)


def forced(draft, hidden, anchor, text):
    """The law of one row's drafts after the text's tokens; where these aren't candidates, the codebook stands in."""
    module, moved = draft.module.candidate_selector, []
    tokens = torch.cat([anchor, text[:-1]])
    forward = module.forward

    def after_text(candidates, projected, previous):
        moved.append(None)
        return forward(candidates, projected, tokens[len(moved) - 1 : len(moved)])

    module.forward = after_text
    try:
        with torch.inference_mode():
            return draft.propose_after(hidden, anchor, lambda logits, k: logits.argmax(-1)).law
    finally:
        module.forward = forward


def test_the_command_line_trains_a_selector(folder, target, tmp_path):  # noqa: F811
    """From a DFlash draft with a frozen backbone: the overlap behind the first draft rises; then everything trains."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"{word} {n}" for word in ("why", "how", "sum") for n in range(32)))
    start, output = tmp_path / "start", tmp_path / "draft"
    assert main(command(folder, start, prompts, "--steps", "40", "--measure-tokens", "4")) == 0
    texts = str(start / "training" / "texts.safetensors")
    shape = ("--method", "dflash2", "--selector-rank", "16", "--selector-top-k", "32", "--texts", texts)
    frozen = (*shape, "--start-from", str(start), "--freeze-backbone", "--every", "1", "--int8")
    assert main(command(folder, output, prompts, *frozen, "--steps", "0", "--measure-tokens", "4")) == 0
    before = json.loads((output / "acceptance.json").read_text())["training"]["held_out"]
    assert main(command(folder, output, prompts, *frozen, "--every", "1000")) == 0
    report = json.loads((output / "acceptance.json").read_text())
    after = report["training"]["held_out"]
    assert all(b > a + 0.05 for a, b in zip(before["overlap"][1:], after["overlap"][1:], strict=True))
    assert report["results"].keys() >= {"greedy", "T=1, drafts sampled", "greedy, shuffled features"}
    draft = load_draft(output, target)
    assert (draft.method, draft.num_drafts, draft.config.selector_rank) == ("dflash2", 3, 16)
    asked = [text.tokens[: text.answer_start].tolist() for text in load_texts(output_texts(start))[:8]]
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "proposal": "sample"}):
        gained = [
            count_rounds(target, each, asked, max_new_tokens=12, **how).tokens_per_round
            for each in (load_draft(start, target), draft)
        ]
        assert gained[1] > gained[0]
    # On from there, all of it, with a share of the loss without the selector.
    more = tmp_path / "more"
    assert main(command(folder, more, prompts, *shape, "--start-from", str(output), "--steps", "2")) == 0
    assert type(load_draft(more, target).config) is DFlash2Config
    assert type(load_draft(start, target).config) is DraftConfig


@pytest.mark.parametrize(
    "options", [[], ["--method", "dspark"], ["--method", "dflash2", "--selector-rank", "5"], ["--layers", "2"]]
)
def test_another_draft_to_start_from_is_refused_before_texts_are_written(
    folder,  # noqa: F811
    target,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    options,
):
    start = tiny_drafts.write(tmp_path / "start", "dflash2 selector only", target, layer_ids=(0, 2))
    monkeypatch.setattr("model_loaders.train_draft.written_texts", lambda *_: pytest.fail("texts were written"))
    given = ["--target", str(folder), "--output", str(tmp_path / "out"), "--device", "cpu", "--start-from", str(start)]
    assert main([*given, *options]) == 2
    assert f"--start-from {start}: its configuration is " in capsys.readouterr().err


def test_the_number_of_candidates_is_free(target, tmp_path):  # noqa: F811
    """It shapes no weight: training may start with another."""
    start = load_draft(tiny_drafts.write(tmp_path, "dflash2 selector only", target, layer_ids=(0, 2)), target)
    check_start(start, replace(start.config, selector_top_k=start.config.selector_top_k + 1))
    with pytest.raises(CheckpointError, match="--start-from"):
        check_start(start, replace(start.config, selector_rank=start.config.selector_rank + 1))


def output_texts(folder):  # noqa: F811
    return folder / "training" / "texts.safetensors"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--freeze-backbone", "--start-from", "x"], "--freeze-backbone with --method dflash"),
        (["--method", "dflash2", "--freeze-backbone"], "--start-from None: expected dflash2 and"),
        (["--method", "dflash2", "--selector-rank", "0"], "--selector-rank=0, expected at least 1"),
        (["--method", "dflash2", "--selector-top-k", "1"], "--selector-top-k=1, expected at least 2"),
        (["--method", "dflash2", "--conv-kernel-size", "2"], "--conv-group-size=0, expected both or neither"),
        (["--method", "dflash2", "--unary", "2"], "--unary=2.0, expected a share from 0 to 1"),
        (["--samples", "7"], "--samples=7, expected at least 8"),
        (["--block-size", "1"], "--block-size=1, expected at least 2 for dflash"),
    ],
)
def test_options_that_do_not_go_together(folder, tmp_path, capsys, options, said):  # noqa: F811
    assert main(["--target", str(folder), "--output", str(tmp_path), "--device", "cpu", *options]) == 2
    assert said in capsys.readouterr().err
