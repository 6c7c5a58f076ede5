"""The engine on a CUDA device: graphs against the same rounds launched piece by piece, and against eager ones."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline import SamplingParams
from pipeline.audit import audit
from pipeline.batch.held import held
from pipeline.engine.branch import Branch
from pipeline.testing.law import check_law
from tests import engines
from tests.engines import MIXED, PROMPTS, WIDE, assert_close, assert_same
from tests.test_engine import CONSTRAINED, GRAMMARS, KINDS, LAWS, spoilt_token

pytestmark = pytest.mark.gpu
SAMPLED = SamplingParams(seed=11, max_new_tokens=24, ignore_eos=True, **WIDE)


def pipe(kind="dflash", engine="graphs", **options):
    return engines.pipe(kind, engine, "cuda", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_the_rounds_they_were_captured_from(kind):
    """Bit for bit, in a batch that refills, shrinks, ends in every way and uses every part of a round."""
    graphs = pipe(kind, max_batch=3)
    for _ in range(2):
        got = graphs.generate(PROMPTS, MIXED)
        assert_same(got, pipe(kind, "overlapped", max_batch=3).generate(PROMPTS, MIXED), exact=True)
    assert graphs._engine.rounds.graphs.num_captured > 3
    assert_close(got, pipe(kind, "eager", max_batch=3).generate(PROMPTS, MIXED))


@pytest.mark.parametrize("engine", ["overlapped", "graphs"])
def test_what_a_sibling_left_lasts_until_it_is_copied(engine, monkeypatch):
    """Beside a round the copy may come late, behind what the round does with memory that was given back."""
    params = replace(SAMPLED, n=6, return_sampling_mask=True, sampling_logprobs="support")
    want = pipe("dflash", engine, max_batch=3).generate(PROMPTS[:3], params)
    beside = Branch.beside

    @contextmanager
    def late(branch):
        with beside(branch):
            torch.cuda._sleep(20_000_000)  # about 10 ms
            yield

    monkeypatch.setattr(Branch, "beside", late)
    assert_same(pipe("dflash", engine, max_batch=3).generate(PROMPTS[:3], params), want, exact=True)


@pytest.mark.parametrize("kind", ["ordinary", "dflash", "dspark vanilla"])
def test_half_precision_whose_adjusted_logits_are_single(kind):
    """Rounds of either dtype in one pipeline, in either order, keep their memory apart."""
    own = pipe(kind, dtype="bfloat16", max_batch=3)
    plain = [replace(SAMPLED, seed=i, return_sampling_mask=i % 2 == 0) for i in range(len(PROMPTS))]
    for params in (plain, MIXED, plain, MIXED):
        got = own.generate(PROMPTS, params)
    assert_same(got, pipe(kind, "overlapped", dtype="bfloat16", max_batch=3).generate(PROMPTS, MIXED), exact=True)


@pytest.mark.parametrize("kind", KINDS)
def test_grammars_in_graphs(kind):
    """The three pieces of a restricted round as graphs, beside the same launched piece by piece and eager ones."""
    pytest.importorskip("xgrammar")
    graphs = pipe(kind, max_batch=3)
    for _ in range(2):
        got = graphs.generate(PROMPTS, GRAMMARS)
        assert_same(got, pipe(kind, "overlapped", max_batch=3).generate(PROMPTS, GRAMMARS), exact=True)
    pieces = {key[1] for key in graphs._engine.rounds.graphs._graphs if isinstance(key, tuple)}
    assert pieces >= {"forward", "settle"}
    assert_close(got, pipe(kind, "eager", max_batch=3).generate(PROMPTS, GRAMMARS))
    assert_close(got, engines.pipe(kind, "eager", max_batch=3).generate(PROMPTS, GRAMMARS))


def halved(ids, scores):
    return scores * 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_eager_rounds_sample_on_the_device(kind):
    """Whatever needs the host between rounds, with laws, supports and logits that stay on the device."""
    params = [
        *MIXED[:2],
        replace(CONSTRAINED, record="audit"),
        replace(MIXED[3], logits_processors=[halved]),
        replace(MIXED[4], record="audit", return_sampling_mask=True, top_k=20, top_logprobs=3),
        *MIXED[5:],
    ]
    own = pipe(kind, "eager", max_batch=3)
    places = set()
    own.observe("verify", lambda verified: places.add(type(held(verified, "support").status).__module__.split(".")[0]))
    got = own.generate(PROMPTS, params)
    assert places == {"cupy"}
    assert_close(got, engines.pipe(kind, "eager", max_batch=3).generate(PROMPTS, params))
    for rollout in got:
        assert rollout.audit is None or audit(rollout).ok


@pytest.mark.parametrize("kind", ["ordinary", "dspark vanilla"])
def test_a_device_gives_what_the_host_gives(kind):
    """The models' float32 sums differ in their last bits, the sampling in none."""
    assert_close(pipe(kind).generate(PROMPTS, MIXED), engines.pipe(kind, "eager").generate(PROMPTS, MIXED))


def test_recording_changes_nothing():
    policies = [replace(SAMPLED, seed=i, max_new_tokens=60) for i in range(len(PROMPTS))]
    masked = [replace(p, return_sampling_mask=True, sampling_logprobs="support", top_logprobs=3) for p in policies]
    graphs = pipe()
    for one, other in zip(graphs.generate(PROMPTS, policies), graphs.generate(PROMPTS, masked), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        mask = other.sampling_mask
        assert len(mask) == len(other.token_ids)
        assert all(token in row for row, token in zip(mask, other.token_ids, strict=True))
        sums = np.add.reduceat(np.exp(mask.logprobs.astype(np.float64)), mask.offsets[:-1])
        np.testing.assert_allclose(sums, 1, atol=1e-5)


@pytest.mark.parametrize("policy", LAWS)
@pytest.mark.parametrize(
    ("kind", "proposal"),
    [("ordinary", "auto"), ("dflash", "argmax"), ("dspark vanilla", "sample"), ("ngram", "auto")],
)
def test_the_law(kind, proposal, policy):
    """Against the enumeration; each of the eight refuses what keeps the law with a chance of 1e-4."""
    options = {"vocab_size": 10, "max_batch": 256, "max_length": 16, "proposal": proposal}
    check_law(pipe(kind, **options), LAWS[policy], prompt=[4, 7, 5, 4, 7], samples=4000, length=2)


def test_supports_are_those_of_the_policy():
    params = SamplingParams(
        temperature=1.1, top_k=6, top_p=0.9, seed=7, max_new_tokens=24, ignore_eos=True, return_sampling_mask=True,
        sampling_logprobs="support",
    )  # fmt: skip
    for kind in ("ordinary", "dflash", "dspark vanilla", "ngram"):
        assert engines.check_supports(pipe(kind, vocab_size=10, max_batch=2), [[4, 7, 5], [1, 2], [3]], params) > 60


def test_requests_that_fail_and_their_neighbours():
    params = [replace(SAMPLED, seed=i, return_sampling_mask=i != 2) for i in range(8)]
    params[1] = replace(params[1], top_k=300, top_p=1.0)
    results = []
    for engine in ("graphs", "overlapped", "eager"):
        own = pipe(engine=engine, max_batch=3, max_support=60)
        with spoilt_token(own.state.target, 299), pytest.warns(UserWarning, match="2 of 8"):
            results.append(own.generate([[5, 299, 6] if i == 4 else p for i, p in enumerate(PROMPTS)], params))
    assert "OVERFLOW" in results[0][1].error
    assert "INVALID" in results[0][4].error
    assert_same(results[0], results[1], exact=True)
    assert_close(results[0], results[2])


def test_graphs_that_are_given_up_are_captured_again():
    policies = [replace(SAMPLED, seed=i, max_new_tokens=70 if i % 2 else 5) for i in range(8)]
    few = pipe(max_batch=4)
    few._engine.rounds.graphs.most = 1
    want = pipe(engine="overlapped", max_batch=4).generate(PROMPTS, policies)
    for _ in range(3):
        assert_same(few.generate(PROMPTS, policies), want)
    assert len(few._engine.rounds.graphs._graphs) == 1


def test_graphs_work_in_memory_of_their_own():
    """What others give up, as `torch.compile`'s graphs do with cuBLAS's workspaces, is no part of them."""
    own, params = pipe(dtype="bfloat16"), [replace(SAMPLED, seed=i) for i in range(len(PROMPTS))]
    for _ in range(2):
        want = own.generate(PROMPTS, params)
    captured = sum(graphs.num_captured for graphs in own._engine.graphs)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]  # where they may have been
    assert_same(own.generate(PROMPTS, params), want, exact=True)
    assert sum(graphs.num_captured for graphs in own._engine.graphs) == captured
    assert all(bool(one.isnan().all()) for one in taken)


def test_new_weights_reach_captured_graphs():
    graphs = pipe("ordinary")  # whose shapes depend on no token
    graphs.generate(PROMPTS, SAMPLED)
    before = graphs.generate(PROMPTS, SAMPLED)
    target = graphs.state.target
    old = {name: weight.detach().clone() for name, weight in target.model.named_parameters()}
    captured = graphs._engine.rounds.graphs.num_captured
    try:
        graphs.update_target_weights({name: weight * 1.5 for name, weight in old.items() if "mlp" in name})
        after = graphs.generate(PROMPTS, SAMPLED)
        assert graphs._engine.rounds.graphs.num_captured == captured
        assert [r.token_ids.tolist() for r in after] != [r.token_ids.tolist() for r in before]
        assert_same(after, pipe("ordinary", "overlapped").generate(PROMPTS, SAMPLED), exact=True)
    finally:
        graphs.update_target_weights(old)
    assert_same(graphs.generate(PROMPTS, SAMPLED), before, exact=True)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark vanilla", "specforge borrowed"])
def test_captured_drafts_see_the_weights_that_they_borrow(kind):
    engines.check_new_weights(kind, "graphs", "cuda")


@pytest.mark.parametrize("kind", ["dspark vanilla", "ngram"])
def test_nothing_in_a_round_waits(kind):
    """torch raises at whatever would synchronise while rounds are launched; CuPy's part is in the graph tests."""
    own = pipe(kind, "overlapped")
    own.generate(PROMPTS, MIXED)
    launch = own._engine.rounds.launch

    def watched(shape, *rest):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(shape, *rest)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    own._engine.rounds.launch = watched
    own.generate(PROMPTS, MIXED)


def test_the_default_is_graphs():
    assert pipe(engine="auto")._engine.rounds.graphs is not None
