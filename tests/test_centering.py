"""Score centering against a dense oracle in extended precision: 9e-14 on every gradient, in float64."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from pipeline import InvalidRequest, Rollouts, SamplingMask, SamplingParams, TopLogprobs
from pipeline.centering import MIS, TIS, Unweighted, score_centered_loss, tail
from pipeline.replay import Recorded, Sequences
from tests import naive_trainer, pipes

LARGEST_ERROR = 9e-14
WEIGHTS = {
    "none": (Unweighted(), ("none",)),
    "tis": (TIS(), ("tis", 2.0)),
    "mis": (MIS(), ("mis", 0.5, 5.0)),
}
# Head sizes: of complete supports, and K of unfiltered top-K. V: 401 tokens.
HEADS = {"support 2": 2, "support 40": 40, "support 401": 401, "top 8": 8, "top 32": 32, "top 128": 128}
LANDSCAPES = ("flat", "usual", "near one", "tiny tail", "tail grows", "far apart")
VOCABULARY = 401
ROWS = 12


def landscape(name, rng):
    """Logits [ROWS, V] of the rollout and of the trainer, a step away from it."""
    scale, step = {
        "flat": (0.3, 0.1),
        "usual": (2.5, 0.3),
        "near one": (1.0, 0.4),
        "tiny tail": (4.0, 0.5),
        "tail grows": (4.0, 0.1),
        "far apart": (3.0, 3.0),
    }[name]
    rollout = rng.normal(scale=scale, size=(ROWS, VOCABULARY))
    if name == "near one":  # one token has 0.999 to 1 - 1e-9
        rollout[np.arange(ROWS), rng.integers(0, VOCABULARY, ROWS)] += rng.uniform(12, 28, ROWS)
    if name == "tiny tail":  # outside the top, between 1e-3 and 1e-9 is left
        order = rollout.argsort(1)
        for row, low in enumerate(rng.uniform(8, 22, ROWS)):
            rollout[row, order[row, :-8]] -= low
    trainer = rollout + rng.normal(scale=step, size=rollout.shape)
    if name == "tail grows":  # from around the floor to ten times that: 1 - mass counts to its last digit
        order = rollout.argsort(1)
        for row in range(ROWS):
            inside, outside = order[row, -8:], order[row, :-8]
            low = np.logaddexp.reduce(rollout[row, outside]) - np.logaddexp.reduce(rollout[row, inside])
            rollout[row, outside] += np.log(rng.uniform(1e-6, 4e-6)) - low
            trainer[row, outside] += np.log(3e-5) - low
    return rollout, trainer


def case(head, land, seed):
    """(trainer's logits, record, per-row heads) as a rollout would have left them: log-probabilities in float32."""
    rng = np.random.default_rng(seed)
    kind, size = head.split()[0], HEADS[head]
    rollout, trainer = landscape(land, rng)
    temperature = rng.choice([0.6, 1.0, 1.7], ROWS)
    tokens, logprobs, heads, values = [], [], [], []
    for row in range(ROWS):
        ids = np.argsort(-rollout[row], kind="stable")[:size]
        dense = naive_trainer.log_softmax(rollout[row], temperature[row], ids if kind == "support" else None)
        probs = np.exp(dense.astype(float))
        token = rng.choice(VOCABULARY, p=probs / probs.sum())
        if kind == "top" and row % 3 == 0:  # a token that the head lacks
            token = np.setdiff1d(np.arange(VOCABULARY), ids)[rng.integers(VOCABULARY - size)]
        tokens.append(token)
        logprobs.append(dense[token])
        heads.append(ids)
        values.append(dense[ids].astype(np.float32))
    record = {"mask": None, "top_logprobs": None}
    if kind == "support":
        order = [np.argsort(ids) for ids in heads]
        record["mask"] = SamplingMask(
            np.concatenate([ids[o] for ids, o in zip(heads, order, strict=True)]).astype(np.int32),
            np.arange(ROWS + 1) * size,
            np.concatenate([v[o] for v, o in zip(values, order, strict=True)]),
            "support",
        )
    else:
        record["top_logprobs"] = TopLogprobs(np.stack(heads).astype(np.int32), np.stack(values))
    recorded = Recorded(
        np.array(tokens, np.int32), np.array(logprobs, np.float32), temperature, np.array([0, ROWS]), **record
    )
    return trainer, recorded, heads, values


CASES = list(itertools.product(HEADS, LANDSCAPES, WEIGHTS))


def test_there_are_enough_cases():
    assert len(CASES) >= 90


@pytest.mark.parametrize(("head", "land", "weights"), CASES, ids=lambda value: value.replace(" ", "_"))
@pytest.mark.parametrize("reward", ["constant", "random"])
def test_loss_and_gradient(head, land, weights, reward):
    """108 cases of 12 rows, twice."""
    seed = 1000 * list(HEADS).index(head) + 100 * LANDSCAPES.index(land)
    trainer, recorded, heads, values = case(head, land, seed)
    advantages = np.ones(ROWS) if reward == "constant" else np.random.default_rng(seed).normal(size=ROWS)
    function, oracle = WEIGHTS[weights]
    logits = torch.tensor(trainer, requires_grad=True)
    result = score_centered_loss(logits, recorded, advantages, weights=function)
    result.loss.sum().backward()
    f = naive_trainer.weight_function(*oracle)
    changed, masses = [], []
    for row in range(ROWS):
        loss, gradient, weight, mass = naive_trainer.centered(
            trainer[row], recorded.temperature[row], recorded.token_ids[row], advantages[row], heads[row], values[row],
            recorded.logprobs[row], f, head.startswith("support"),
        )  # fmt: skip
        assert np.abs(logits.grad[row].numpy() - gradient).max() <= LARGEST_ERROR
        assert abs(result.loss[row].item() - loss) <= 1e-9 * max(1, abs(loss))
        ratio = np.exp(result.log_ratio[row].item())
        changed.append(weights != "none" and not np.isclose(float(weight), ratio))
        masses.append(mass)
    assert result.metrics.clip_share == np.mean(changed)
    assert result.metrics.trainer_head_mass == pytest.approx(float(np.mean(masses)), abs=1e-12)
    assert result.metrics.in_head_share == np.mean([t in h for t, h in zip(recorded.token_ids, heads, strict=True)])


def test_the_cases_hold_what_they_are_for():
    """Tokens outside their head, tails below and above the floor, clipped and masked tokens."""
    outside, tails, logratios = 0, [], []
    for head, land in itertools.product(HEADS, LANDSCAPES):
        trainer, recorded, heads, values = case(
            head, land, 1000 * list(HEADS).index(head) + 100 * LANDSCAPES.index(land)
        )
        outside += sum(t not in h for t, h in zip(recorded.token_ids, heads, strict=True))
        if head.startswith("top"):
            tails += [1 - np.exp(v.astype(float)).sum() for v in values]
        result = score_centered_loss(torch.tensor(trainer), recorded, 1.0, weights="mis")
        logratios += result.log_ratio.tolist()
    assert outside >= 60
    assert min(tails) < 1e-7 < 1e-6 < np.median(tails) < max(tails)
    assert min(logratios) < np.log(0.5) < np.log(5) < max(logratios)


def test_a_constant_reward_leaves_no_drift_over_a_complete_support():
    """Summed over the rollout's own law, the gradient is 0 for any trainer: only the covariance is left."""
    trainer, recorded, heads, values = case("support 40", "usual", 7)
    for weights in WEIGHTS:
        total = np.zeros(VOCABULARY)
        for token, value in zip(heads[0], values[0], strict=True):
            logits = torch.tensor(trainer[:1], requires_grad=True)
            one = Recorded(
                np.array([token], np.int32),
                np.array([value]),
                recorded.temperature[:1],
                np.array([0, 1]),
                SamplingMask(recorded.mask[0], np.array([0, 40]), recorded.mask.row_logprobs(0), "support"),
            )
            score_centered_loss(logits, one, 1.0, weights=weights).loss.sum().backward()
            total += np.exp(float(value)) * logits.grad[0].numpy()
        assert np.abs(total).max() < 1e-6, weights  # float32 records sum to one within that


def test_a_ratio_that_overflows_stays_bounded():
    """The rollout's law is nearly zero where the trainer's is one, and the other way round: exp(900) is never taken."""
    logits = torch.tensor([[900.0, 0.0, 0.0], [-900.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    values = np.array([[0.0, -800.0, -np.inf], [0.0, -800.0, -np.inf]], np.float32)
    ids = np.array([[1, 0, -1], [0, 1, -1]], np.int32)
    recorded = Recorded(
        np.array([0, 0], np.int32), np.array([-800.0, 0.0], np.float32), np.ones(2), np.array([0, 2]), None,
        TopLogprobs(ids, values),
    )  # fmt: skip
    for weights, expected in (("none", [1, 1]), ("tis", [2, 0]), ("mis", [0, 0])):
        logits.grad = None
        result = score_centered_loss(logits, recorded, 1.0, weights=weights)
        result.loss.sum().backward()
        assert torch.isfinite(result.loss).all()
        assert torch.isfinite(logits.grad).all()
        assert result.log_ratio.tolist() == [800.0, pytest.approx(-900 - np.log(2))]
        assert WEIGHTS[weights][0].of_tokens(result.log_ratio).tolist() == pytest.approx(expected)


def test_a_token_that_the_trainer_excludes():
    """log p_y = -inf: a weight of 0 leaves nothing of it; without weights no finite loss exists."""
    logits = torch.tensor([[0.0, -np.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    logprobs = np.log(np.array([0.25, 0.25, 0.5], np.float32))
    mask = SamplingMask(np.array([0, 1, 2], np.int32), np.array([0, 3]), logprobs, "support")
    recorded = Recorded(np.array([1], np.int32), logprobs[1:2], np.ones(1), np.array([0, 1]), mask)
    for weights in ("tis", "mis"):
        logits.grad = None
        loss = score_centered_loss(logits, recorded, 1.0, weights=weights).loss
        loss.sum().backward()
        assert torch.isfinite(loss).all()
        assert torch.isfinite(logits.grad).all()
    assert not np.isfinite(score_centered_loss(logits, recorded, 1.0, weights="none").loss.item())


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["support 40", "top 32"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_on_cuda_as_on_the_cpu(head, dtype):
    trainer, recorded, _, _ = case(head, "usual", 3)
    results = []
    for device in ("cpu", "cuda"):
        logits = torch.tensor(trainer).to(device, dtype).requires_grad_()
        result = score_centered_loss(logits, recorded, 1.0)
        result.loss.sum().backward()
        assert result.loss.device.type == logits.grad.device.type == device
        results.append((result.loss.cpu(), logits.grad.cpu()))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-12 if dtype == torch.float64 else 2**-7, atol=1e-14)


@pytest.mark.parametrize("head", ["support 40", "top 32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_computed_in_float64(head, dtype):
    trainer, recorded, _, _ = case(head, "usual", 3)
    low = torch.tensor(trainer).to(dtype).requires_grad_()
    high = low.detach().double().requires_grad_()
    results = [score_centered_loss(logits, recorded, 1.0) for logits in (low, high)]
    for result in results:
        result.loss.sum().backward()
    assert results[0].loss.dtype == torch.float32
    assert torch.equal(results[0].loss, results[1].loss.float())
    # Rounded once, by way of float32.
    assert torch.equal(low.grad, high.grad.float().to(dtype))


def test_blocks_of_rows_change_nothing(monkeypatch):
    trainer, recorded, _, _ = case("top 32", "usual", 5)
    gradients = []
    for elements in (1, 3 * VOCABULARY, 1 << 22):
        monkeypatch.setattr(tail, "BLOCK_ELEMENTS", elements)
        logits = torch.tensor(trainer, requires_grad=True)
        score_centered_loss(logits, recorded, 1.0).loss.sum().backward()
        gradients.append(logits.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def changed(recorded, **values):
    return dataclasses.replace(recorded, **values)


class TestRefusedSupports:
    def record(self, **values):
        trainer, recorded, _, _ = case("support 40", "usual", 1)
        mask = recorded.mask
        fields = {name: getattr(mask, name).copy() for name in ("token_ids", "offsets", "logprobs")} | {
            "mode": mask.mode
        }
        return torch.tensor(trainer), recorded, fields

    def refuse(self, match, change, **options):
        logits, recorded, fields = self.record()
        change(fields)
        bad = changed(recorded, mask=SamplingMask(**fields))
        with pytest.raises(InvalidRequest, match=match):
            score_centered_loss(logits, bad, 1.0, head="support", **options)

    def test_it_does_not_sum_to_one(self):
        def change(fields):
            fields["logprobs"][3 * 40 : 4 * 40] += np.log(0.999).astype(np.float32)

        self.refuse(r"mask\[3\] sums to .*0\.999.*, expected 1 within 2e-05", change)

    def test_it_lacks_the_token(self):
        logits, recorded, _ = self.record()
        tokens = recorded.token_ids.copy()
        tokens[5] = np.setdiff1d(np.arange(VOCABULARY), recorded.mask[5])[0]
        with pytest.raises(InvalidRequest, match=rf"token_ids\[5\]={tokens[5]}, expected one of the 40 tokens of mask"):
            score_centered_loss(logits, changed(recorded, token_ids=tokens), 1.0)

    def test_it_exceeds_k(self):
        self.refuse(r"mask\[0\]\.size=40, expected at most max_support=32", lambda fields: None, max_support=32)

    def test_an_empty_row(self):
        def change(fields):
            fields["offsets"][4] = fields["offsets"][3]

        self.refuse(r"mask\[3\]=\[\], expected at least one token", change)

    @pytest.mark.parametrize("token", [-1, VOCABULARY])
    def test_an_id_outside_the_vocabulary(self, token):
        def change(fields):
            fields["token_ids"][2 * 40 + (0 if token < 0 else 39)] = token

        self.refuse(rf"mask\[2\] has token id={token}, expected at least 0 and below the vocabulary, 401", change)

    def test_unsorted_ids(self):
        def change(fields):
            fields["token_ids"][40:42] = fields["token_ids"][40:42][::-1].copy()

        self.refuse(r"mask\[1\] has token ids=\d+, \d+ side by side, expected ascending ids, each once", change)

    def test_an_id_twice(self):
        def change(fields):
            fields["token_ids"][12 * 40 - 1] = fields["token_ids"][12 * 40 - 2]

        self.refuse(r"mask\[11\] has token ids=(\d+), \1 side by side", change)

    def test_the_logprob_of_another_token(self):
        logits, recorded, _ = self.record()
        logprobs = recorded.logprobs.copy()
        logprobs[7] -= 0.01
        with pytest.raises(InvalidRequest, match=r"logprobs\[7\]=.*: the records don't line up"):
            score_centered_loss(logits, changed(recorded, logprobs=logprobs), 1.0)

    def test_only_the_selected_log_probabilities(self):
        logits, recorded, fields = self.record()
        mask = SamplingMask(fields["token_ids"], fields["offsets"], recorded.logprobs, "selected")
        with pytest.raises(InvalidRequest, match=r"mask=one in mode 'selected', expected one in mode \"support\""):
            score_centered_loss(logits, changed(recorded, mask=mask), 1.0, head="support")


class TestRefusedTops:
    def refuse(self, match, change):
        trainer, recorded, _, _ = case("top 8", "usual", 2)
        fields = {
            "ids": recorded.top_logprobs.ids.copy(),
            "values": recorded.top_logprobs.values.copy(),
            "temperature": recorded.temperature.copy(),
            "filtered": None,
        }
        change(fields)
        bad = changed(
            recorded,
            top_logprobs=TopLogprobs(fields["ids"], fields["values"]),
            temperature=fields["temperature"],
            filtered=fields["filtered"],
        )
        with pytest.raises(InvalidRequest, match=match):
            score_centered_loss(torch.tensor(trainer), bad, 1.0)

    def test_more_than_one(self):
        def change(fields):
            fields["values"][4] += 20

        self.refuse(r"top_logprobs\[4\] has log-probability=.*, expected at most 0", change)

    def test_a_sum_above_one(self):
        def change(fields):
            fields["values"][4, :4] = np.log(0.3)

        self.refuse(r"top_logprobs\[4\] sums to 1\.2.*, expected at most 1", change)

    def test_an_id_twice(self):
        def change(fields):
            fields["ids"][6, 3] = fields["ids"][6, 2]

        self.refuse(r"top_logprobs\[6\] has a token id twice in \[.*\], expected each once", change)

    def test_outside_the_vocabulary(self):
        def change(fields):
            fields["ids"][6, 3] = VOCABULARY

        self.refuse(r"top_logprobs\[6\] has token id=401, expected", change)

    def test_padding_in_the_middle(self):
        def change(fields):
            fields["ids"][1, 3], fields["values"][1, 3] = -1, -np.inf

        self.refuse(r"top_logprobs\[1\]: ids=.*only -1 with -inf behind the last", change)

    def test_a_probability_on_padding(self):
        def change(fields):
            fields["ids"][1, 7] = -1

        self.refuse(r"top_logprobs\[1\]: ids=", change)

    def test_an_empty_row(self):
        def change(fields):
            fields["ids"][2], fields["values"][2] = -1, -np.inf

        self.refuse(r"top_logprobs\[2\]: ids=.*expected at least one id", change)

    def test_a_filtered_policy(self):
        def change(fields):
            fields["filtered"] = np.arange(ROWS) == 9

        self.refuse(r"top_logprobs\[9\] of a filtered policy, expected top_k=None", change)

    def test_a_greedy_token(self):
        def change(fields):
            fields["temperature"][3] = 0

        self.refuse(r"temperature\[3\]=0.0, expected at least 1e-5: a greedy token", change)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TIS(0), "clip=0, expected a finite number above 0"),
        (lambda: TIS(float("inf")), "clip=inf, expected"),
        (lambda: MIS(2, 1), "low=2, high=1, expected low below high"),
        (lambda: MIS(True, 1), "low=True, expected"),
    ],
)
def test_refused_weights(make, match):
    with pytest.raises(InvalidRequest, match=match):
        make()


def test_refused_options():
    trainer, recorded, _, _ = case("top 8", "usual", 2)
    logits = torch.tensor(trainer)
    for options, match in (
        ({"weights": "ppo"}, "weights='ppo', expected"),
        ({"head": "tail"}, "head='tail', expected"),
        ({"advantages": np.ones(3)}, "advantages=.*, expected a number, or 12 of them"),
        ({"advantages": np.where(np.arange(ROWS) == 4, np.nan, 1.0)}, r"advantages\[4\]=nan, expected a finite number"),
        ({"logits": logits[1:]}, "logits rows=11, expected 12"),
        ({"logits": logits.long()}, "logits=torch.int64"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            score_centered_loss(**({"logits": logits, "recorded": recorded, "advantages": 1.0} | options))
    with pytest.raises(InvalidRequest, match="top_logprobs=None, expected the recorded top K"):
        score_centered_loss(logits, changed(recorded, top_logprobs=None), 1.0)


def trainer_logits(rollouts):
    """The tiny target's own logits for every token, as a trainer computes them."""
    batch = Sequences.from_rollouts(rollouts)
    with torch.no_grad():
        logits = (
            pipes.target().model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        )
    return logits[batch.rows, batch.positions]


PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44]]


@pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
@pytest.mark.parametrize("k", [32, 128])
def test_the_pipelines_top_k_is_what_centering_needs(speculative, k):
    """Generated unfiltered, and replayed by the same model: ratios of 1, the heads' masses agree."""
    params = SamplingParams(temperature=1.3, max_new_tokens=9, seed=3, n=2, top_logprobs=k, ignore_eos=True)
    rollouts = pipes.pipe(speculative).generate(PROMPTS, params)
    recorded = Recorded.from_rollouts(rollouts)
    assert recorded.top_logprobs.ids.shape == (36, k)
    assert not recorded.filtered.any()
    result = score_centered_loss(trainer_logits(rollouts).requires_grad_(), recorded, 1.0, weights="mis")
    assert result.log_ratio.abs().max() < 1e-4
    assert result.metrics.clip_share == 0
    assert abs(result.metrics.rollout_head_mass - result.metrics.trainer_head_mass) < 1e-5
    assert 0 < result.metrics.in_head_share < 1  # a head that isn't all of a flat policy
    assert result.metrics.rollout_head_mass < 0.95


@pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
@pytest.mark.parametrize("mode", ["support", "selected"])
def test_both_modes_of_sampling_logprobs(speculative, mode):
    """ "support" carries what centering needs; "selected" what replay needs, and centering says so."""
    params = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.95, max_new_tokens=9, seed=3, ignore_eos=True,
        return_sampling_mask=True, sampling_logprobs=mode,
    )  # fmt: skip
    rollouts = pipes.pipe(speculative).generate(PROMPTS, params)
    recorded = Recorded.from_rollouts(rollouts)
    logits = trainer_logits(rollouts)
    if mode == "selected":
        with pytest.raises(InvalidRequest, match='expected one in mode "support"'):
            score_centered_loss(logits, recorded, 1.0, head="support")
        assert recorded.mask.logprobs.tolist() == recorded.logprobs.tolist()
        return
    result = score_centered_loss(logits, recorded, 1.0)
    assert result.log_ratio.abs().max() < 1e-4
    assert result.metrics.rollout_head_mass == pytest.approx(1, abs=1e-6)
    assert result.metrics.trainer_head_mass == pytest.approx(1, abs=1e-12)
    with pytest.raises(InvalidRequest, match="top_logprobs=None"):
        score_centered_loss(logits, recorded, 1.0, head="top")


def test_top_k_of_filtered_rollouts_is_refused():
    params = SamplingParams(top_k=20, max_new_tokens=4, seed=3, top_logprobs=8)
    rollouts = pipes.pipe(False).generate(PROMPTS, [dataclasses.replace(params, top_k=None), params])
    recorded = Recorded.from_rollouts(rollouts)
    first = len(rollouts[0].token_ids)
    with pytest.raises(InvalidRequest, match=rf"top_logprobs\[{first}\] of a filtered policy"):
        score_centered_loss(trainer_logits(rollouts), recorded, 1.0)
    assert isinstance(rollouts[:1], Rollouts)
    score_centered_loss(trainer_logits(rollouts[:1]), Recorded.from_rollouts(rollouts[:1]), 1.0)
