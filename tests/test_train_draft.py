"""Draft training on tiny targets: blocks as in decoding, a falling loss, a resumed run that is the same."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_loaders.drafts.backbone import FULL, SLIDING
from model_loaders.drafts.checkpoint import load_draft
from model_loaders.drafts.dflash import DFlashDraft
from model_loaders.targets import load_target
from model_loaders.train_draft import check_options, draft_config, main, mask_token_id, parser, written_texts
from model_loaders.training.acceptance import count_rounds
from model_loaders.training.blocks import block_hidden, draw_anchors
from model_loaders.training.dataset import Batch, Batches, Text, load_texts, save_texts
from model_loaders.training.loss import LossWeights, batch_loss, compiled_compare
from model_loaders.training.prompts import Plan, from_file, mixed, prompt_ids, read_prompts, self_written
from model_loaders.training.step import target_states
from model_loaders.training.trainer import Trainer, TrainingOptions
from model_loaders.training.writing import Writer
from tests.test_dflash import logits_of, make_draft
from tests.tiny_models import write_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target whose next token hardly depends on more than the last: easily learned."""
    folder = write_tiny_target(tmp_path_factory.mktemp("target"), vocab_size=260, num_layers=4, logit_std=6.0)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.mul_(0.1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder), device="cpu")


@pytest.mark.parametrize(
    "kind",
    [{}, {"layer_types": (SLIDING, FULL), "sliding_window": 3}, {"causal": True},
     {"layer_types": (SLIDING,), "sliding_window": 4, "causal": False}],
)  # fmt: skip
def test_training_blocks_equal_proposals(kind):
    """Every anchor's block in one training forward has the logits that decoding gives at that anchor."""
    draft = make_draft(**kind)
    generator = torch.Generator().manual_seed(5)
    length, anchors = 12, torch.tensor([[1, 4, 5, 9], [2, 3, 7, 10]])
    features = torch.randn(2, length, 72, generator=generator)
    tokens = torch.randint(0, 60, (2, length), generator=generator)
    ids = torch.full((2, 4, draft.block_size), draft.mask_token_id)
    ids[..., 0] = tokens.gather(1, anchors)
    hidden = block_hidden(draft.module, draft.target.embed(ids), features, anchors)
    for row in range(2):
        for column in range(4):
            anchor = int(anchors[row, column])
            cache = draft.new_cache(1, 32)
            draft.extend(features[row : row + 1, :anchor], torch.arange(anchor)[None], cache)
            expected = logits_of(draft, tokens[row, anchor : anchor + 1], torch.tensor([anchor]), cache)
            got = draft.target.head(hidden[row, column, 1:])
            torch.testing.assert_close(got[None], expected, atol=1e-4, rtol=1e-4)


def test_anchors_lie_in_the_answer():
    batch = Batch(
        torch.zeros(3, 20, dtype=torch.int64), torch.tensor([20, 8, 6]), torch.tensor([4, 5, 4]), torch.ones(3)
    )
    anchors, real = draw_anchors(batch, 6, torch.Generator().manual_seed(0))
    assert real.sum(1).tolist() == [6, 2, 1]
    for row, (low, high) in enumerate([(4, 18), (5, 6), (4, 4)]):
        kept = anchors[row][real[row]].tolist()
        assert len(set(kept)) == len(kept)
        assert all(low <= anchor <= high for anchor in kept)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_and_its_gradient(compiled):
    """Against a loop over anchors and drafts with recorded gradients: a greedy text and a sampled one, an end of text
    inside a block; gradients in pieces too."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, 4, 8, generator=generator, requires_grad=True)
    target_hidden = torch.randn(2, 10, 8, generator=generator)
    weight = torch.randn(11, 8, generator=generator)
    tokens = torch.randint(0, 11, (2, 10), generator=generator)
    batch = Batch(tokens, torch.tensor([10, 7]), torch.tensor([1, 1]), torch.tensor([0.0, 0.7]))
    anchors, real = torch.tensor([[1, 5, 8], [2, 5, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    total, norm, overlap = torch.zeros(()), 0.0, torch.zeros(3)
    for b, temperature in enumerate((None, 0.7)):
        for a in range(3):
            for k in range(1, 4):
                at = int(anchors[b, a]) + k
                if not real[b, a] or at >= batch.lengths[b]:
                    continue
                scale = float(torch.tensor(-(k - 1) / 4.0).exp())
                logits, wanted = weight @ hidden[b, a, k], torch.eye(11)[tokens[b, at]]
                if temperature is not None:
                    logits = logits / temperature
                    wanted = (weight @ target_hidden[b, at - 1] / temperature).softmax(-1)
                distance = (logits.softmax(-1) - wanted).abs().sum()
                total = total + scale * (0.75 * -(wanted * logits.log_softmax(-1)).sum() + 0.25 * distance)
                norm, overlap[k - 1] = norm + scale, overlap[k - 1] + 1 - distance.detach() / 2
    (total / norm).backward()
    expected, hidden.grad = hidden.grad, None
    how = {"comparing": compiled_compare()} if compiled else {}
    stats = batch_loss(
        [hidden[:, :, 1:]], lambda rows: (rows[0] @ weight.T, None), lambda x: x @ weight.T, target_hidden, batch,
        anchors, real, 3, LossWeights(0.75, 0.25), backward=True, rows_at_once=5, **how,
    )  # fmt: skip
    torch.testing.assert_close(stats.loss, (total / norm).detach())
    torch.testing.assert_close(stats.overlap, overlap)
    torch.testing.assert_close(hidden.grad, expected)
    assert stats.counts.tolist() == [5, 3, 3]


def test_target_states_are_the_cached_forward(target):
    """The features that a draft trains on are those that decoding gives it."""
    tokens = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    features, last = target_states(target, (0, 2), tokens)
    target.set_taps((0, 2))
    out = target.forward(tokens, torch.arange(9).expand(2, -1), target.new_cache(2, 9))
    target.set_taps(())
    torch.testing.assert_close(features, out.features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.head(last), out.logits, atol=1e-4, rtol=1e-4)


def test_writer_writes_the_targets_own_text(target):
    """Greedy answers are the model's own; turns are closed by the template; slots are reused."""
    prompts = [(10, 20, 30), (40, 50), (60, 61, 62, 63), (9,)]
    plans = [Plan(prefix, None, 0.0) for prefix in prompts]
    plans.insert(2, Plan((70, 71), (258, 10, 257, 65), 0.0))  # a user turn of the target's own
    texts = Writer(target, slots=2, max_length=24, user_tokens=5, look_every=4).write(plans, 5)
    assert len(texts) == 5
    for prefix in prompts:
        text = next(t for t in texts if tuple(t.tokens[: len(prefix)].tolist()) == prefix)
        assert text.answer_start == len(prefix)
        ids = list(prefix)
        while len(ids) < 24 and not (len(ids) > len(prefix) and ids[-1] in target.eos_token_ids):
            with torch.inference_mode():
                ids.append(int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert text.tokens.tolist() == ids
    own = next(t for t in texts if tuple(t.tokens[:2].tolist()) == (70, 71))
    assert own.tokens[own.answer_start - 4 : own.answer_start].tolist() == [258, 10, 257, 65]
    assert own.answer_start - 4 - 2 <= 5


def test_self_written_plans_follow_the_template(target):
    plans = self_written(target, 3, (0.0, 1.0))
    for index, plan in zip(range(30), plans, strict=False):
        prefix, suffix = target.decode(plan.prefix, skip_special_tokens=False), plan.suffix
        assert "<|im_start|>user\n" in prefix
        assert target.decode(suffix, skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert plan.temperature == (0.0, 1.0)[index % 2]


def test_texts_on_disk_and_batches(tmp_path):
    texts = [Text(torch.arange(n, dtype=torch.int32), 2, 0.5) for n in (3, 9, 5)]
    save_texts(tmp_path / "texts.safetensors", texts)
    found = load_texts(tmp_path / "texts.safetensors")
    assert [t.tokens.tolist() for t in found] == [t.tokens.tolist() for t in texts]
    batches = Batches(found, 2, 6, seed=1)
    seen = [n for step in range(3) for n in batches.at(step).lengths.tolist()]
    assert sorted(seen[:3]) == sorted(seen[3:]) == [3, 5, 6]
    assert torch.equal(Batches(found, 2, 6, seed=1).at(2).tokens, batches.at(2).tokens)


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"prompt": "c"}\n')
    assert read_prompts(path) == ["a", "c"]
    path.write_text('{"question": "a"}\n')
    with pytest.raises(ValueError, match=r"line 1.*expected"):
        read_prompts(path)


@pytest.mark.parametrize("num_given", [0, 3, 8, 19, 20, 31])
def test_given_plans_lie_evenly_among_own_ones(num_given):
    given = [Plan((i,), None, 0.0) for i in range(num_given)]
    own = (Plan((i,), (0,), 0.0) for i in range(20))
    plans = list(mixed(given, own, 20))
    assert len(plans) == 20
    assert [plan for plan in plans if plan.suffix is None] == given[:20]
    assert [plan.prefix[0] for plan in plans if plan.suffix] == list(range(20 - min(num_given, 20)))
    share = min(num_given, 20) / 20
    for stop in range(21):
        assert abs(sum(plan.suffix is None for plan in plans[:stop]) - share * stop) < 1


def test_a_files_plans_are_its_prompts_once_a_temperature(target, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {i}\n" for i in range(20)))
    plans = from_file(target, path, 3, (0.0, 1.0))
    asked = [tuple(prompt_ids(target, f"question {i}")) for i in range(20)]
    assert sorted((plan.prefix, plan.temperature) for plan in plans) == sorted(
        (p, t) for p in asked for t in (0.0, 1.0)
    )
    assert all(plan.suffix is None for plan in plans)
    assert {plan.temperature for plan in plans[:10]} == {0.0, 1.0}
    assert plans == from_file(target, path, 3, (0.0, 1.0)) != from_file(target, path, 4, (0.0, 1.0))


@pytest.mark.parametrize(("options", "own"), [([], range(1, 15)), (["--only-prompts"], [0])])
def test_prompts_are_answered_beside_self_written_ones(folder, target, tmp_path, options, own):
    """Each once; the rest of --samples is the target's own, but for texts that end before their answer has begun."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {i}\n" for i in range(10)))
    asked = {tuple(prompt_ids(target, f"question {i}")) for i in range(10)}
    line = ["--target", str(folder), "--output", str(tmp_path / "out"), "--prompts", str(path), "--samples", "24"]
    line += ["--slots", "8", "--max-length", "200", "--temperatures", "0", *options]
    args = parser().parse_args(line)
    check_options(args)
    texts = written_texts(args, target)
    found = [tuple(text.tokens[: text.answer_start].tolist()) for text in texts]
    assert sorted(prompt for prompt in found if prompt in asked) == sorted(asked)
    assert len(found) - 10 in own
    assert len(load_texts(tmp_path / "out" / "training" / "texts.safetensors")) == len(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only-prompts"], "--only-prompts without --prompts, expected the file"),
        (["--held-out", "0"], "--held-out=0, expected at least 1"),
    ],
)
def test_options_that_cannot_be(folder, tmp_path, capsys, options, message):
    assert main(["--target", str(folder), "--output", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mask_token(target):
    assert mask_token_id(None, target) == 256  # <|endoftext|>: special, and not in the chat template
    with pytest.raises(ValueError, match="--mask-token"):
        mask_token_id("nothing", target)


def command(folder, output, prompts, *more):
    return [
        "--target", str(folder), "--output", str(output), "--device", "cpu", "--prompts", str(prompts),
        "--samples", "96", "--slots", "96", "--max-length", "40", "--held-out", "8", "--layers", "1",
        "--block-size", "4", "--steps", "120", "--batch", "8", "--anchors", "16", "--every", "1000",
        "--learning-rate", "2e-2", "--temperatures", "0", "--measure-prompts", "8", "--measure-tokens", "12",
        *more,
    ]  # fmt: skip


def random_texts(count):
    generator = torch.Generator().manual_seed(1)
    return [Text(torch.randint(0, 250, (16,), generator=generator).int(), 4, 0.0) for _ in range(count)]


def test_the_log_is_what_the_steps_came_to(target, tmp_path):
    """Means over the steps since the row before, by position over the tokens that were guessed."""
    options = TrainingOptions(steps=5, batch=2, anchors=4, length=16, log_every=2, every=3)
    args = parser().parse_args(["--target", "t", "--output", "o", "--layers", "1", "--block-size", "4"])
    trainer = Trainer(target, draft_config(args, target), random_texts(8), random_texts(2), options, tmp_path)
    steps, one_step = [], trainer.one_step

    def kept():
        steps.append(one_step())
        return steps[-1]

    trainer.one_step = kept
    assert trainer.train()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], "held_out" in row) for row in log] == [
        (2, False), (3, True), (4, False), (5, False), (5, True)
    ]  # fmt: skip
    for row, window in zip([log[0], log[2], log[3]], [steps[:2], steps[2:4], steps[4:]], strict=True):
        assert row["loss"] == pytest.approx(sum(float(step.loss) for step in window) / len(window))
        for k in range(3):
            guessed = sum(int(step.counts[k]) for step in window)
            for name, key in (("accuracy", "hits"), ("target_probability", "mass"), ("overlap", "overlap")):
                found = sum(float(getattr(step, key)[k]) for step in window)
                assert row[name][k] == pytest.approx(found / guessed, abs=1e-4)
    assert log[-1]["held_out"] == trainer.evaluate()


def test_training_shows_its_progress(target, tmp_path, capsys):
    """A bar to the last step from the one resumed at, with the loss and the first draft's accuracy."""
    options = TrainingOptions(steps=6, batch=2, anchors=4, length=16, log_every=2)
    args = parser().parse_args(["--target", "t", "--output", "o", "--layers", "1", "--block-size", "4"])

    def trainer():
        return Trainer(target, draft_config(args, target), random_texts(8), [], options, tmp_path)

    first, second = trainer(), trainer()
    first.held_out = second.held_out = [first.batches.at(0)]
    assert not first.train(until=4)
    assert re.search(r"training: 100%.* 4/4 .*first=[01]\.\d{3}, loss=\d+\.\d{3}", capsys.readouterr().err)
    assert second.resume()
    assert second.train()
    shown = capsys.readouterr().err
    assert re.search(r"training:  67%.* 4/6 ", shown)
    assert re.search(r"training: 100%.* 6/6 .*first=[01]\.\d{3}, loss=\d+\.\d{3}", shown)


def test_command_line_trains_resumes_and_exports(folder, target, tmp_path):
    """One run in a piece, one stopped and resumed: the same draft, which beats an untrained one."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"{word} {n}" for word in ("why", "how", "sum") for n in range(32)))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main(command(folder, whole, prompts)) == 0
    texts = str(whole / "training" / "texts.safetensors")
    assert main(command(folder, halves, prompts, "--texts", texts, "--stop-after", "1")) == 0
    assert main(command(folder, halves, prompts, "--texts", texts, "--resume")) == 0
    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert [row["step"] for row in log] == [20, 40, 60, 80, 100, 120, 120]  # the last: of held-out texts
    for row in (*log[:-1], log[-1]["held_out"]):
        assert row["loss"] > 0
        for name in ("accuracy", "target_probability", "overlap"):  # one a draft of the block
            assert len(row[name]) == 3
            assert all(0 <= share <= 1 for share in row[name])
    assert log[-2]["accuracy"][0] > log[0]["accuracy"][0]
    assert all(0 <= row["lr"] <= 2e-2 for row in log[:-1])
    first, second = load_draft(str(whole), target), load_draft(str(halves), target)
    for name, tensor in first.module.state_dict().items():
        torch.testing.assert_close(second.module.state_dict()[name], tensor, msg=name)
    report = json.loads((whole / "acceptance.json").read_text())
    trained = report["results"]["greedy"]["tokens_per_round"]["held_out"]
    random_draft = DFlashDraft(type(first.module)(first.config).eval(), target)
    asked = [text.tokens[: text.answer_start].tolist() for text in load_texts(whole / "training" / "texts.safetensors")]
    untrained = count_rounds(target, random_draft, asked[:8], max_new_tokens=12, temperature=0.0)
    assert trained > untrained.tokens_per_round + 0.2
    # It has learned to read the features: a neighbour's are worse, in the report and counted again, the same each time.
    shuffled = report["results"]["greedy, shuffled features"]
    assert shuffled["tokens_per_round"]["held_out"] < trained
    assert shuffled["first_k_accepted"][0] < report["results"]["greedy"]["first_k_accepted"][0]
    plain, *wrong = (
        count_rounds(target, first, asked[:8], max_new_tokens=12, temperature=0.0, shuffle_features=shuffle)
        for shuffle in (False, True, True)
    )
    assert plain.tokens_per_round == pytest.approx(trained, abs=1e-3)
    assert wrong[0].tokens_per_round == wrong[1].tokens_per_round
    assert wrong[0].tokens_per_round == pytest.approx(shuffled["tokens_per_round"]["held_out"], abs=1e-3)
    # Features that are every row's alike can't be mixed up.
    alike = (
        count_rounds(target, first, asked[:1] * 4, max_new_tokens=12, temperature=0.0, shuffle_features=shuffle)
        for shuffle in (False, True)
    )
    assert len({tuple(rounds.tokens.tolist() + rounds.rounds.tolist()) for rounds in alike}) == 1
    # Going on from a finished draft begins where it ended.
    more = tmp_path / "more"
    options = ("--texts", texts, "--start-from", str(whole), "--steps", "0", "--measure-tokens", "4")
    assert main(command(folder, more, prompts, *options)) == 0
    for name, tensor in load_draft(str(more), target).module.state_dict().items():
        torch.testing.assert_close(first.module.state_dict()[name], tensor, msg=name)
    assert main(command(folder, more, prompts, *options, "--layers", "2")) == 2
    # So it does with wider MLPs, and no draft is made narrower.
    wide = tmp_path / "wide"
    size = first.module.config.intermediate_size
    assert main(command(folder, wide, prompts, *options, "--intermediate-size", str(size + 8))) == 0
    wider = load_draft(str(wide), target)
    assert wider.module.config.intermediate_size == size + 8
    for part in ("gate_proj", "up_proj"):  # they differ in what training finds to use
        assert wider.module.state_dict()[f"layers.0.mlp.{part}.weight"][size:].abs().min() > 0
    cache, other = first.new_cache(1, 32), wider.new_cache(1, 32)
    features, positions = torch.randn(1, 5, first.module.fc.weight.shape[1]), torch.arange(5)[None]
    start = torch.tensor([7]), torch.tensor([5])
    first.extend(features, positions, cache), wider.extend(features, positions, other)
    torch.testing.assert_close(logits_of(wider, *start, other), logits_of(first, *start, cache), atol=1e-5, rtol=1e-5)
    assert main(command(folder, more, prompts, *options, "--intermediate-size", str(size - 8))) == 2
    # Another run's state is refused.
    assert main(command(folder, whole, prompts, "--resume", "--seed", "1")) == 2
