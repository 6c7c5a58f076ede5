"""Replay in torch: log-probabilities, entropy and ratios over recorded supports, against the dense oracle."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from pipeline import InvalidRequest, Rollouts, SamplingMask, SamplingParams, TopLogprobs
from pipeline.replay import (
    Recorded,
    Sequences,
    Supports,
    arguments,
    importance_ratios,
    replay,
    support_entropy,
    support_logprobs,
)
from tests import naive_trainer, pipes

VOCABULARY = 211
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def a_mask(rng, rows, largest=40, mode="selected"):
    ids = [np.sort(rng.choice(VOCABULARY, rng.integers(1, largest + 1), replace=False)) for _ in range(rows)]
    offsets = np.cumsum([0, *map(len, ids)])
    if mode == "selected":
        logprobs = -rng.random(rows, np.float32)
    else:
        logprobs = np.concatenate([np.full(len(row), -np.log(len(row))) for row in ids]).astype(np.float32)
    return SamplingMask(np.concatenate(ids).astype(np.int32), offsets, logprobs, mode)


def a_case(rows=20, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    mask = a_mask(rng, rows)
    tokens = np.array([rng.choice(row) for row in mask])
    logits = torch.tensor(rng.normal(scale=4, size=(rows, VOCABULARY))).to(dtype).requires_grad_()
    return logits, mask, tokens, rng.choice([0.3, 1.0, 1.9], rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_entropy_and_gradient(dtype):
    logits, mask, tokens, temperature = a_case(dtype=dtype)
    result = replay(logits, mask, temperature, token_ids=tokens)
    assert result.logprobs.dtype == result.entropy.dtype == (dtype if dtype == torch.float64 else torch.float32)
    rng = np.random.default_rng(1)
    by_token, by_entropy = rng.normal(size=(2, len(tokens)))
    (result.logprobs * torch.tensor(by_token) + result.entropy * torch.tensor(by_entropy)).sum().backward()
    assert logits.grad.dtype == dtype
    rounding = {torch.float64: 0, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    of_results = 0 if dtype == torch.float64 else 2**-24
    values = logits.detach().double().numpy()
    for row, (support, token) in enumerate(zip(mask, tokens, strict=True)):
        oracle = naive_trainer.log_softmax(values[row], temperature[row], support)[token]
        assert abs(result.logprobs[row].item() - oracle) <= 4e-15 * (1 + abs(oracle)) + of_results * abs(oracle)
        entropy = naive_trainer.entropy(values[row], temperature[row], support)
        assert abs(result.entropy[row].item() - entropy) <= 4e-15 * (1 + entropy) + of_results * entropy
        # In lower precisions the gradients of the two results reach the kernel as float32.
        gradient = by_token[row] * naive_trainer.token_gradient(values[row], temperature[row], support, token)
        gradient += by_entropy[row] * naive_trainer.entropy_gradient(values[row], temperature[row], support)
        scale = np.abs(gradient).max()
        error = np.abs(logits.grad[row].double().numpy() - gradient)
        assert (
            error <= 2e-14 + (rounding + of_results) * np.abs(gradient) + 8 * of_results * (scale + 1) + 2**-25
        ).all()
        assert not logits.grad[row].double().numpy()[np.setdiff1d(np.arange(VOCABULARY), support)].any()


def test_float64_gradients_are_exact_enough():
    """The figure that the trainers' side is held to."""
    logits, mask, tokens, temperature = a_case(rows=200, seed=9)
    support_logprobs(logits, mask, temperature, token_ids=tokens).sum().backward()
    for row, (support, token) in enumerate(zip(mask, tokens, strict=True)):
        oracle = naive_trainer.token_gradient(logits[row].detach().numpy(), temperature[row], support, token)
        assert np.abs(logits.grad[row].numpy() - oracle).max() <= 9e-14


def test_masking_to_minus_infinity_in_torch_gives_the_same():
    logits, mask, tokens, temperature = a_case(seed=2)
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, support in enumerate(mask):
        kept[row, support] = True
    other = logits.detach().clone().requires_grad_()
    dense = torch.log_softmax((other / torch.tensor(temperature)[:, None]).masked_fill(~kept, -torch.inf), -1)
    expected = dense.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    ours = support_logprobs(logits, mask, temperature, token_ids=torch.tensor(tokens))
    weights = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(ours, expected, rtol=0, atol=1e-14)
    assert torch.allclose(logits.grad, other.grad, rtol=0, atol=1e-14)


def test_gradcheck():
    logits, mask, tokens, temperature = a_case(rows=3, seed=4)

    def both(x):
        result = replay(x, mask, temperature, token_ids=tokens)
        return result.logprobs, result.entropy

    assert torch.autograd.gradcheck(both, (logits,), eps=1e-6, atol=1e-7)
    assert torch.equal(both(logits)[1], support_entropy(logits, mask, temperature))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_cuda_as_on_the_cpu(dtype):
    logits, mask, tokens, temperature = a_case(dtype=dtype)
    other = logits.detach().cuda().requires_grad_()
    results = [replay(each, mask, temperature, token_ids=tokens) for each in (logits, other)]
    assert results[1].logprobs.device == results[1].entropy.device == other.device
    assert torch.equal(results[0].logprobs, results[1].logprobs.cpu())
    assert torch.allclose(
        results[0].entropy, results[1].entropy.cpu(), rtol=2**-24 if dtype != torch.float64 else 1e-15
    )
    by_token = torch.linspace(-1, 1, len(tokens), dtype=results[0].logprobs.dtype)
    for result in results:
        (result.logprobs * by_token.to(result.logprobs.device)).sum().backward(retain_graph=True)
    assert torch.equal(logits.grad, other.grad.cpu())
    logits.grad = other.grad = None
    for result in results:
        result.entropy.sum().backward()
    close = {"rtol": 1e-12 if dtype == torch.float64 else 2**-7, "atol": 1e-14}
    assert torch.allclose(logits.grad, other.grad.cpu(), **close)


@pytest.mark.gpu
def test_prepared_supports_wait_for_nothing_and_follow_torchs_stream():
    logits, mask, tokens, temperature = a_case(rows=50, dtype=torch.bfloat16)
    expected = replay(logits, mask, temperature, token_ids=tokens)
    (expected.logprobs + expected.entropy).sum().backward()
    supports = Supports.of(mask, temperature, vocab_size=VOCABULARY, token_ids=tokens, device="cuda")
    warm = logits.detach().cuda().requires_grad_()
    supports.logprobs(warm).sum().backward()  # compiles
    other, stream = torch.zeros_like(logits, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    source = logits.detach().cuda()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # were the kernels elsewhere, they would see zeros
            other.copy_(source)
            leaf = other.detach().requires_grad_()
            result = supports.replay(leaf)
            (result.logprobs + result.entropy).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(result.logprobs.cpu(), expected.logprobs)
    assert torch.allclose(leaf.grad.cpu(), logits.grad, rtol=2**-7, atol=1e-14)


@pytest.mark.gpu
def test_on_cuda_rows_may_be_strided_and_columns_copied():
    logits, mask, tokens, temperature = a_case()
    expected = support_logprobs(logits, mask, temperature, token_ids=tokens)
    wide = torch.full((20, 3, VOCABULARY + 5), torch.nan, dtype=torch.float64, device="cuda")
    wide[:, 1, 2:-3] = logits.detach().cuda()
    for view in (wide[:, 1, 2:-3], logits.detach().cuda().T.contiguous().T):
        assert torch.equal(support_logprobs(view, mask, temperature, token_ids=tokens).cpu(), expected)


@pytest.mark.gpu
def test_on_cuda_without_cupy(monkeypatch):
    logits, mask, tokens, temperature = a_case(rows=3)
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"logits on cuda:0, expected CuPy for them: install specmask\[cuda12\]"):
        support_logprobs(logits.detach().cuda(), mask, temperature, token_ids=tokens)


def test_supports_prepared_once():
    """For several passes, also over logits with padding tokens behind the vocabulary."""
    logits, mask, tokens, temperature = a_case()
    supports = Supports.of(mask, temperature, vocab_size=VOCABULARY, token_ids=tokens)
    for step in range(3):
        again = logits.detach() * (1 - step / 4)
        padded = torch.cat([again, torch.full((len(again), 5), torch.nan, dtype=torch.float64)], 1)
        expected = replay(again, mask, temperature, token_ids=tokens)
        for given in (again, padded):
            result = supports.replay(given)
            assert torch.equal(result.logprobs, expected.logprobs)
            assert torch.equal(result.entropy, expected.entropy)
            assert torch.equal(supports.logprobs(given), expected.logprobs)
            assert torch.equal(supports.entropy(given), expected.entropy)


def test_supports_refuse():
    logits, mask, _, temperature = a_case(rows=6)
    supports = Supports.of(mask, temperature, vocab_size=VOCABULARY)
    with pytest.raises(InvalidRequest, match=r"token_ids=None, expected the taken tokens: give them to Supports\.of"):
        supports.logprobs(logits)
    with pytest.raises(InvalidRequest, match="logits rows=5, expected 6"):
        supports.entropy(logits[1:])
    with pytest.raises(InvalidRequest, match="logits vocabulary=210, expected at least vocab_size=211"):
        supports.entropy(logits[:, 1:])
    with pytest.raises(InvalidRequest, match="logits on meta, expected them on the CPU or on CUDA"):
        supports.entropy(logits.detach().to("meta"))
    with pytest.raises(InvalidRequest, match=r"mask\[\d\] has token id=\d+, expected .*below the vocabulary, 200"):
        Supports.of(SamplingMask(mask.token_ids + 200, mask.offsets, mask.logprobs, "selected"), vocab_size=200)


def test_read_only_masks(recwarn):
    """As files give them."""
    logits, mask, tokens, temperature = a_case()
    for array in (mask.token_ids, mask.offsets, mask.logprobs, tokens, temperature):
        array.flags.writeable = False
    support_logprobs(logits, mask, temperature, token_ids=tokens).sum().backward()
    assert not list(recwarn)


def test_several_masks_are_one():
    logits, mask, tokens, temperature = a_case(rows=12)
    cuts = [0, 5, 6, 12]
    parts = [
        SamplingMask(
            mask.token_ids[mask.offsets[a] : mask.offsets[b]],
            mask.offsets[a : b + 1] - mask.offsets[a],
            mask.logprobs[a:b],
            "selected",
        )
        for a, b in itertools.pairwise(cuts)
    ]
    whole = support_logprobs(logits, mask, temperature, token_ids=tokens)
    assert torch.equal(whole, support_logprobs(logits, parts, temperature, token_ids=tokens))
    assert torch.equal(support_entropy(logits, mask, temperature), support_entropy(logits, parts, temperature))


def test_views_of_a_larger_tensor():
    """As a trainer slices them: rows apart, or tokens apart; the gradient lands in the whole."""
    logits, mask, tokens, temperature = a_case()
    expected = support_logprobs(logits, mask, temperature, token_ids=tokens)
    wide = torch.full((20, 3, VOCABULARY + 5), torch.nan, dtype=torch.float64)
    wide[:, 1, 2:-3] = logits.detach()
    wide.requires_grad_()
    ours = support_logprobs(wide[:, 1, 2:-3], mask, temperature, token_ids=tokens)
    assert torch.equal(ours, expected)
    (ours.sum() + expected.sum()).backward()
    assert torch.equal(wide.grad[:, 1, 2:-3], logits.grad)
    assert not wide.grad[:, 0].any()
    across = logits.detach().T.contiguous().T
    assert torch.equal(support_logprobs(across, mask, temperature, token_ids=tokens), expected)


def test_only_the_gradient_is_dense():
    """Neither pass makes another [n, V] tensor, and the logits needn't live until the backward pass."""
    logits, mask, tokens, temperature = a_case(rows=8)
    dense = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() >= logits.numel():
                dense.add(out.untyped_storage().data_ptr())
            return out

    with Watch():
        result = replay(logits, mask, temperature, token_ids=tokens)
        entries = result.logprobs.grad_fn.next_functions[0][0]
        (result.logprobs + result.entropy).sum().backward(retain_graph=True)
    assert dense <= {logits.data_ptr(), logits.grad.data_ptr()}
    assert [saved.numel() for saved in entries.saved_tensors] == [len(mask.token_ids)]


def test_greedy_tokens():
    logits, mask, _, _ = a_case(rows=3)
    single = SamplingMask(np.array([7, 8, 9], np.int32), np.arange(4), np.zeros(3, np.float32), "selected")
    result = replay(logits, single, [0.0, 1e-6, 1.0], token_ids=[7, 8, 9])
    (result.logprobs + result.entropy).sum().backward()
    assert result.logprobs.tolist() == result.entropy.tolist() == [0.0] * 3
    assert not logits.grad.any()
    wide = SamplingMask(mask.token_ids, mask.offsets, mask.logprobs, "selected")
    row = int((mask.sizes > 1).argmax())
    with pytest.raises(InvalidRequest, match=rf"temperature\[{row}\]=0.0, expected at least 1e-5: mask\[{row}\] has"):
        support_entropy(logits, wide, 0.0)


def test_a_token_without_probability_under_the_trainer():
    """-inf, as log_softmax says; the entropy and its gradient stay finite."""
    logits = torch.tensor([[0.0, -np.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    mask = SamplingMask(np.array([0, 1, 2], np.int32), np.array([0, 3]), np.zeros(1, np.float32), "selected")
    result = replay(logits, mask, token_ids=[1])
    assert result.logprobs.tolist() == [-np.inf]
    result.entropy.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert result.entropy.item() == pytest.approx(float(naive_trainer.entropy(np.array([0.0, 1.0]), 1.0, [0, 1])))


class TestRefused:
    def refuse(self, match, **changes):
        logits, mask, tokens, temperature = a_case(rows=6)
        fields = {name: np.copy(getattr(mask, name)) for name in ("token_ids", "offsets", "logprobs")}
        fields |= {
            "mode": "selected",
            "tokens": tokens,
            "logits": logits,
            "temperature": temperature,
            "max_support": None,
        }
        for name, change in changes.items():
            fields[name] = change(fields[name]) if callable(change) else change
        logits, tokens, temperature = fields.pop("logits"), fields.pop("tokens"), fields.pop("temperature")
        limit = fields.pop("max_support")
        with pytest.raises(InvalidRequest, match=match):
            support_logprobs(logits, SamplingMask(**fields), temperature, token_ids=tokens, max_support=limit)

    def test_rows(self):
        def put(index, value):
            def change(array):
                array[index] = value
                return array

            return change

        _, mask, _, _ = a_case(rows=6)
        offsets = mask.offsets
        large = int(mask.sizes.argmax())
        self.refuse(r"mask\[2\]=\[\], expected at least one token", offsets=put(2, offsets[3]))
        self.refuse(r"mask\.offsets\[4\]=\d+, expected at least offsets\[3\]", offsets=put(3, offsets[4] + 1))
        self.refuse(r"mask\.offsets=.*, expected them to start at 0", offsets=put(0, 1))
        self.refuse(r"mask\.offsets\[6\]=\d+, expected the number of entries", offsets=put(6, offsets[6] - 1))
        self.refuse(rf"mask\[{large}\].*side by side, expected ascending", token_ids=put(offsets[large + 1] - 1, 0))
        self.refuse(r"mask\[5\] has token id=211, expected .*below the vocabulary, 211", token_ids=put(-1, 211))
        self.refuse(r"mask\[0\] has token id=-3, expected at least 0", token_ids=put(0, -3))
        self.refuse(rf"mask\[{large}\]\.size=.*max_support={mask.sizes[large] - 1}", max_support=mask.sizes[large] - 1)
        missing = int(np.setdiff1d(np.arange(VOCABULARY), mask[4])[0])
        self.refuse(rf"token_ids\[4\]={missing}, expected one of the \d+ tokens of mask\[4\]", tokens=put(4, missing))
        self.refuse(r"mask\.logprobs\[3\]=nan, expected a number of at most 0", logprobs=put(3, np.nan))
        self.refuse(r"mask\.logprobs\[3\]=0.5, expected a number of at most 0", logprobs=put(3, 0.5))

    def test_shapes(self):
        self.refuse("token_ids: 5 tokens, expected 6", tokens=lambda tokens: tokens[1:])
        self.refuse("token_ids=.*one-dimensional array of integers", tokens=lambda tokens: tokens * 1.0)
        self.refuse("logits rows=5, expected 6", logits=lambda logits: logits[1:])
        self.refuse("logits=torch.int64", logits=lambda logits: logits.detach().long())
        self.refuse("logits=list", logits=lambda logits: logits.tolist())
        self.refuse("temperature=.*expected a number, or 6 of them", temperature=[1.0, 2.0])
        self.refuse(r"temperature\[0\]=-1.0, expected at least 0", temperature=-1.0)
        self.refuse(r"temperature\[0\]=inf, expected a finite number", temperature=np.inf)
        self.refuse("mask.mode='all', expected", mode="all")
        self.refuse(r"mask\.logprobs=float32\[6\], expected a NumPy array \[\d+\] in mode 'support'", mode="support")
        self.refuse(
            r"mask\.token_ids=float64\[\d+\], expected a one-dimensional array of integers",
            token_ids=lambda ids: ids * 1.0,
        )

    def test_masks(self):
        logits, mask, tokens, _ = a_case(rows=6)
        for masks, got in (([], r"\[\]"), ([mask, None], "list"), (None, "None"), (7, "int")):
            with pytest.raises(InvalidRequest, match=f"mask={got}, expected a SamplingMask or a non-empty sequence"):
                support_logprobs(logits, masks, token_ids=tokens)
        other = a_mask(np.random.default_rng(0), 6, mode="support")
        with pytest.raises(InvalidRequest, match=r"mask.mode=\['selected', 'support'\], expected one mode"):
            support_logprobs(logits, [mask, other], token_ids=tokens)


class TestRatios:
    def test_values_and_gradient(self):
        trainer = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
        recorded = np.array([-1.0, -1.5, -0.75], np.float32)
        ratios = importance_ratios(trainer, recorded)
        ratios.ratio.sum().backward()
        assert ratios.log_ratio.tolist() == [0.0, -0.5, 0.25]
        assert np.allclose(ratios.ratio.detach(), np.exp([0, -0.5, 0.25]), rtol=1e-15)
        assert torch.equal(trainer.grad, ratios.ratio.detach())
        assert not ratios.bounded.any()

    def test_nothing_overflows_and_it_says_so(self):
        trainer = torch.tensor([0.0, -900.0, -1.0], requires_grad=True)
        ratios = importance_ratios(trainer, torch.tensor([-900.0, 0.0, -1.0]), low=0.1, high=2.0)
        ratios.ratio.sum().backward()
        assert ratios.log_ratio.tolist() == [900.0, -900.0, 0.0]
        assert ratios.ratio.tolist() == pytest.approx([2.0, 0.1, 1.0])
        assert ratios.bounded.tolist() == [True, True, False]
        assert trainer.grad.tolist() == [0.0, 0.0, 1.0]
        assert importance_ratios(trainer, np.array([-900.0, 0.0, -1.0])).ratio.max().item() == pytest.approx(1e4)

    def test_refused(self):
        trainer = torch.zeros(3)
        with pytest.raises(InvalidRequest, match=r"low=2, high=1.0, expected 0 <= low < high"):
            importance_ratios(trainer, np.zeros(3), low=2, high=1.0)
        with pytest.raises(InvalidRequest, match=r"recorded: shape \[2\], expected \[3\], as logprobs"):
            importance_ratios(trainer, np.zeros(2))


PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44]]


class TestRollouts:
    def rollouts(self, speculative=True, **values):
        params = SamplingParams(
            **{"temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 9, "seed": 3, "ignore_eos": True}
            | values,
            return_sampling_mask=True,
        )
        return pipes.pipe(speculative).generate(PROMPTS, [params, dataclasses.replace(params, max_new_tokens=5)])

    @pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
    @pytest.mark.parametrize("mode", ["selected", "support"])
    def test_the_target_replays_its_own_rollouts(self, speculative, mode):
        """The unchanged model, run over whole sequences, gives back the recorded log-probabilities: ratios of 1."""
        rollouts = self.rollouts(speculative, sampling_logprobs=mode)
        recorded, batch = Recorded.from_rollouts(rollouts), Sequences.from_rollouts(rollouts, pad_token_id=7)
        assert len(recorded) == 14
        assert recorded.starts.tolist() == [0, 9, 14]
        assert recorded.temperature.tolist() == [float(np.float32(0.8))] * 14
        assert recorded.filtered.all()
        assert batch.input_ids.shape == (2, 12)
        assert batch.input_ids[1, 10:].tolist() == [7, 7]
        model = pipes.target().model
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        logprobs = support_logprobs(
            logits[batch.rows, batch.positions], recorded.mask, recorded.temperature, token_ids=recorded.token_ids
        )
        ratios = importance_ratios(logprobs, recorded.logprobs)
        assert (ratios.ratio - 1).abs().max() < 1e-5
        separate = [rollout.sampling_mask for rollout in rollouts]
        tokens = np.concatenate([rollout.token_ids for rollout in rollouts])
        again = support_logprobs(logits[batch.rows, batch.positions], separate, recorded.temperature, token_ids=tokens)
        assert torch.equal(logprobs, again)

    def test_read_back_from_parquet(self, tmp_path):
        rollouts = self.rollouts()
        back = Rollouts.from_parquet(rollouts.to_parquet(tmp_path / "rollouts.parquet"))
        a, b = Recorded.from_rollouts(rollouts), Recorded.from_rollouts(back)
        assert a.temperature.tolist() == b.temperature.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
        assert a.mask.token_ids.tolist() == b.mask.token_ids.tolist()

    def test_records_that_do_not_line_up(self):
        good = Recorded.from_rollouts(self.rollouts())
        for changes, match in (
            ({"logprobs": good.logprobs[1:]}, r"logprobs: shape \[13\], expected \[14\]: one a token"),
            ({"temperature": 1.0}, r"temperature: shape \[\], expected \[14\]"),
            ({"filtered": good.filtered[1:]}, r"filtered: shape \[13\]"),
            ({"starts": np.array([0, 13])}, r"starts=\[0, 13\], expected ascending ones from 0 to 14"),
            (
                {"logprobs": np.where(np.arange(14) == 6, -np.inf, good.logprobs)},
                r"logprobs\[6\]=-inf, expected a finite",
            ),
            (
                {"logprobs": np.where(np.arange(14) == 6, np.nan, good.logprobs)},
                r"logprobs\[6\]=nan, expected a number",
            ),
            ({"mask": a_mask(np.random.default_rng(0), 3)}, "mask rows=3, expected 14"),
            ({"top_logprobs": TopLogprobs(np.zeros((2, 1)), np.zeros((2, 1)))}, "top_logprobs: 2 rows, expected 14"),
        ):
            with pytest.raises(InvalidRequest, match=match):
                dataclasses.replace(good, **changes)

    def test_per_token(self):
        recorded = Recorded.from_rollouts(self.rollouts())
        assert recorded.per_token([1.0, -1.0]).tolist() == [1.0] * 9 + [-1.0] * 5
        with pytest.raises(InvalidRequest, match=r"values: shape \[3\], expected one for each of 2"):
            recorded.per_token([1, 2, 3])

    def test_without_provenance_the_temperature_must_be_said(self):
        rollouts = list(self.rollouts())
        with pytest.raises(
            InvalidRequest, match="temperature=None, expected a number: these rollouts have no provenance"
        ):
            Recorded.from_rollouts(rollouts)
        recorded = Recorded.from_rollouts(rollouts, temperature=0.8)
        assert recorded.filtered is None
        assert recorded.temperature.tolist() == [0.8] * 14

    def test_refused(self):
        good = self.rollouts()
        provenance = good.provenance

        def refuse(match, second, how=Recorded.from_rollouts):
            with pytest.raises(InvalidRequest, match=match):
                how(Rollouts([good[0], second], provenance))

        change = dataclasses.replace
        failed = change(good[1], error="OVERFLOW: ...")
        refuse(r"rollouts\[1\]\.error='OVERFLOW: \.\.\.', expected finished rollouts", failed)
        refuse(r"rollouts\[1\]\.error=", failed, Sequences.from_rollouts)
        refuse(r"rollouts\[1\]\.logprobs=None, expected return_logprobs=True", change(good[1], logprobs=None))
        refuse(r"rollouts\[1\]\.logprobs: 4, expected 5", change(good[1], logprobs=good[1].logprobs[1:]))
        refuse(r"rollouts\[1\]\.sampling_mask=None, expected one in all", change(good[1], sampling_mask=None))
        refuse(r"rollouts\[1\]: mask rows=9, expected 5", change(good[1], sampling_mask=good[0].sampling_mask))
        refuse(r"rollouts\[1\]\.params_index=2, expected one of the provenance's 2", change(good[1], params_index=2))
        for how in (Recorded.from_rollouts, Sequences.from_rollouts):
            with pytest.raises(InvalidRequest, match=r"rollouts=\[\], expected at least one"):
                how([])
