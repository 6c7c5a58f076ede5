"""Faults, each injected: the request that has one ends with its reason, the others as if nothing had been."""

import errno
import os
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from model_loaders.kv_cache import RowCache
from model_loaders.kv_cache.storage import Storage
from pipeline import InvalidRequest, SamplingParams
from pipeline.batch.slot_limit import ROUNDS_A_SLOT, SlotLimit
from pipeline.jobs import Job
from pipeline.jobs.running import run
from pipeline.prompt_file import PromptLine
from pipeline.running.stepping import MOST_CONTAINED
from tests import pipes
from tests.test_jobs import PARAMS as JOB_PARAMS
from tests.test_jobs import PROMPTS, assert_same_rollouts, rollouts_of, write
from tests.test_jobs import run as run_job

PARAMS = SamplingParams(top_k=20, max_new_tokens=7, ignore_eos=True, seed=3, return_sampling_mask=True)
LINES = [PromptLine(1 + i, [4 + i, 5], replace(PARAMS, seed=i, n=1 + i % 3), f"p{i}") for i in range(9)]


class Faulty:
    """A stage that does what another does, except where `fault(requests)` raises or spoils its record."""

    preserves_law = True

    def __init__(self, stage, fault):
        self.stage, self.fault = stage, fault

    def __call__(self, state, *records):
        spoil = self.fault(requests_of(records[0]) if records else state.running)
        result = self.stage(state, *records)
        return spoil(result) if callable(spoil) else result


def requests_of(record):
    while not hasattr(record, "requests"):
        record = getattr(record, "proposal", None) or getattr(record, "verified", None) or record.captured
    return record.requests


def names(requests):
    return [int(request.prompt.token_ids[0]) - 4 for request in requests]


def finished(pipe, lines=LINES):
    """The rollouts of a run, by prompt and sample."""
    found = [rollout for _, rollouts in run(pipe, lines) for rollout in rollouts]
    assert not pipe.has_work
    places = [(r.prompt_index, r.sample_index) for r in found]
    assert len(set(places)) == len(places) == sum(line.params.n for line in lines)
    return dict(sorted(zip(places, found, strict=True)))


def assert_only_failed(found, clean, failed, message):
    """The prompts in `failed` ended as "abort" with the message, and all others as in the clean run."""
    for place, rollout in found.items():
        if place[0] in failed:
            assert rollout.finish_reason == "abort"
            assert message in rollout.error
            assert not len(rollout.token_ids)
        else:
            assert rollout.error is None
            np.testing.assert_array_equal(rollout.token_ids, clean[place].token_ids)
            np.testing.assert_array_equal(rollout.sampling_mask.token_ids, clean[place].sampling_mask.token_ids)
            np.testing.assert_allclose(rollout.logprobs, clean[place].logprobs, atol=1e-5)


@pytest.fixture(scope="module", params=[True, False], ids=["dflash", "ordinary"])
def speculative(request):
    return request.param


@pytest.fixture(scope="module")
def clean(speculative):
    return finished(pipes.pipe(speculative))


def in_a_capture(error):
    """What comes out of a capture that such an error ended."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
    except RuntimeError as found:
        return found


# --- out of memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("prefill", torch.OutOfMemoryError("CUDA out of memory")),
        ("forward", torch.OutOfMemoryError("CUDA out of memory")),
        ("verify", MemoryError()),
        ("finish", RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")),
        ("forward", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        ("verify", RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")),
        ("draft", in_a_capture(torch.OutOfMemoryError("CUDA out of memory"))),
    ],
    ids=["prefill", "forward", "verify", "finish", "cublas", "driver", "capture"],
)
def test_out_of_memory_means_fewer_slots(speculative, clean, stage, error):
    pipe, largest = pipes.pipe(speculative), []

    def fault(requests):
        if len(requests) > 2:
            raise error
        largest.append(len(requests))

    pipe.stages[stage] = Faulty(pipe.stages[stage], fault)
    assert_only_failed(finished(pipe), clean, (), "")
    assert max(largest) == 2
    assert pipe.state.slot_limit.limit <= 2 or stage == "prefill"


@pytest.mark.parametrize("stage", ["draft", "forward", "capture"])
def test_who_loses_a_slot_in_the_middle_starts_again(speculative, clean, stage):
    pipe, rounds, restarted = pipes.pipe(speculative), [], []

    def fault(requests):
        rounds.append(len(requests))
        if len(rounds) > 4 and len(requests) > 1:
            restarted.extend(request for request in requests if request.num_generated > 1)
            raise torch.OutOfMemoryError("CUDA out of memory")

    pipe.stages[stage] = Faulty(pipe.stages[stage], fault)
    assert_only_failed(finished(pipe), clean, (), "")
    assert restarted
    assert rounds[-1] == 1


def test_out_of_memory_without_containment():
    pipe = pipes.pipe()

    def fault(requests):
        if len(requests) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    pipe.stages["forward"] = Faulty(pipe.stages["forward"], fault)
    prompts = [[4], [5], [6]]
    found = pipe.generate(prompts, PARAMS)
    wanted = pipes.pipe().generate(prompts, PARAMS)
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in wanted]
    assert pipe.state.slot_limit.limit == 1


@pytest.mark.parametrize("stage", ["prefill", "forward"])
def test_a_request_too_large_by_itself_ends_alone(speculative, clean, stage):
    pipe = pipes.pipe(speculative)

    def fault(requests):
        if 4 in names(requests):
            raise torch.OutOfMemoryError("CUDA out of memory: 90 GiB")

    pipe.stages[stage] = Faulty(pipe.stages[stage], fault)
    message = "out of memory alone in the batch: OutOfMemoryError: CUDA out of memory: 90 GiB"
    assert_only_failed(finished(pipe), clean, {4}, message)


def test_a_hiccup_costs_nothing():
    pipe, calls = pipes.pipe(), []

    def fault(requests):
        calls.append(names(requests))
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    pipe.stages["forward"] = Faulty(pipe.stages["forward"], fault)
    pipe.generate([[4], [5], [6]], PARAMS)
    assert calls[2] == calls[3]
    assert pipe.state.slot_limit.limit == pipe.state.slot_limit.most


def test_slots_come_back():
    slots = SlotLimit(8)
    assert slots.shrink(8)
    assert slots.shrink(4)
    assert not slots.shrink(1)
    assert slots.limit == 2
    for _ in range(ROUNDS_A_SLOT):
        slots.succeed()
    assert slots.limit == 3
    for _ in range(20 * ROUNDS_A_SLOT):
        slots.succeed()
    assert slots.limit == 8


@pytest.mark.parametrize(
    ("fatal", "together", "width"),
    [
        *((n, False, 4) for n in range(1, 4)),
        (1, True, 4),
        *((n, False, 5) for n in range(1, 7)),
        (1, True, 5),
        (2, True, 5),
    ],
)
def test_a_cache_that_could_not_grow_is_as_it_was(monkeypatch, fatal, together, width):
    """Storage by storage, so the memory may end between two of them; values of another width are one by themselves."""
    cache = RowCache(
        3, 2, 4, value_head_dim=width, num_slots=4, max_length=256, dtype=torch.float32, device="cpu", together=together
    )
    positions = torch.arange(64)[None]
    entries = [torch.randn(1, 2, 64, 4 if i < 3 else width) for i in range(6)]
    for layer in range(3):
        cache.write(layer, entries[layer], entries[layer + 3], positions)
    zeros, count = Storage._zeros, []

    def scarce(self, *shape):
        count.append(shape)
        if len(count) == fatal:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(self, *shape)

    monkeypatch.setattr(Storage, "_zeros", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        cache.begin(torch.arange(100, 101)[None], [2])
    monkeypatch.undo()
    assert cache.allocated == (1, 64)
    new = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, width)
    for grown in (False, True):  # as it was, and once it does grow
        for layer in range(3):
            at = [2] if grown else [0]
            held = cache.write(layer, *new, torch.tensor([[70 if grown else 63]]), at)
            assert all(part[0, :, -1].equal(entry[0, :, 0]) for part, entry in zip(held, new, strict=True))
            assert cache.snapshot(0, 63).keys[layer].equal(entries[layer][0, :, :63])
            assert cache.snapshot(0, 63).values[layer].equal(entries[layer + 3][0, :, :63])


# --- numbers, tokenizers, user code ---------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("stage", ["prefill", "forward"])
def test_bad_logits_end_their_request(speculative, clean, stage, poison):
    pipe = pipes.pipe(speculative)

    def fault(requests):
        def spoil(block):
            for b, name in enumerate(names(block.proposal.requests)):
                if name == 2:
                    logits = block.logits.clone()
                    logits[b] = poison
                    block = replace(block, logits=logits)
            return block

        return spoil

    pipe.stages[stage] = Faulty(pipe.stages[stage], fault)
    assert_only_failed(finished(pipe), clean, {2}, "INVALID: the policy of output token")


def test_a_tokenizer_that_fails_on_one_prompt(monkeypatch):
    pipe = pipes.pipe()
    encode = pipe.state.target.encode

    def failing(text, **options):
        if text == "bad":
            raise OverflowError("too much of it")
        return encode(text, **options)

    monkeypatch.setattr(pipe.state.target, "encode", failing)
    lines = [PromptLine(i, text, PARAMS) for i, text in enumerate(("one", "bad", "two"))]
    found = finished(pipe, lines)
    assert [r.ok for r in found.values()] == [True, False, True]
    assert "prompt='bad', expected one that the tokenizer takes: too much of it" in found[1, 0].error


@pytest.mark.parametrize("stops", [(), ("never so",)])
def test_a_tokenizer_that_fails_on_one_output(speculative, clean, monkeypatch, stops):
    pipe = pipes.pipe(speculative)
    bad = set(clean[2, 1].token_ids.tolist()) - {
        token for place, rollout in clean.items() if place[0] != 2 for token in rollout.token_ids.tolist()
    }
    assert bad
    tokenizer = pipe.state.target.tokenizer
    if stops:
        stage = pipe.stages["finish"]
        find_end = type(stage)._end

        def end(state, request, tokens):
            if request.prompt.token_ids[0] == 6 and bad & set(tokens):
                raise UnicodeError("no such byte")
            return find_end(state, request, tokens)

        monkeypatch.setattr(stage, "_end", end, raising=False)
    else:
        decode = tokenizer.decode

        def failing(ids, **options):
            if bad & set(ids):
                raise UnicodeError("no such byte")
            return decode(ids, **options)

        monkeypatch.setattr(tokenizer, "decode", failing)
    found = finished(pipe)
    wrong = {place for place, rollout in found.items() if rollout.error}
    assert (2, 1) in wrong
    assert {place[0] for place in wrong} == {2}
    assert "the tokenizer failed on the output: UnicodeError: no such byte" in found[2, 1].error
    rest = {place: rollout for place, rollout in found.items() if place not in wrong}
    assert_only_failed(rest, clean, (), "")


def test_a_processor_that_raises(clean, speculative):
    def broken(ids, scores):
        raise KeyError("no such thing")

    lines = [replace(line, params=replace(line.params, logits_processors=[broken])) for line in LINES[3:4]]
    found = finished(pipes.pipe(speculative), [*LINES[:3], *lines, *LINES[4:]])
    assert_only_failed(found, clean, {3}, "logits_processors: KeyError: 'no such thing'")


@pytest.mark.parametrize("stage", ["prefill", "draft", "forward", "adjust", "verify", "capture", "commit", "pack"])
def test_a_stage_that_fails_for_one_request(speculative, clean, stage):
    pipe = pipes.pipe(speculative)

    def fault(requests):
        if 4 in names(requests):
            raise ZeroDivisionError("four")

    pipe.stages[stage] = Faulty(pipe.stages[stage], fault)
    found = finished(pipe)
    assert_only_failed(found, clean, {4}, "a stage failed: ZeroDivisionError: four")
    assert pipe.state.slot_limit.limit == pipe.state.slot_limit.most


def test_faults_that_others_survive_never_add_up(speculative):
    """Many more than `MOST_CONTAINED`, with rounds between them that go well."""
    pipe = pipes.pipe(speculative)

    def fault(requests):
        if any(name % 2 for name in names(requests)):
            raise ZeroDivisionError("odd")

    pipe.stages["adjust"] = Faulty(pipe.stages["adjust"], fault)
    lines = [PromptLine(i, [4 + i], replace(PARAMS, max_new_tokens=2)) for i in range(3 * MOST_CONTAINED)]
    found = finished(pipe, lines)
    assert [rollout.ok for rollout in found.values()] == [i % 2 == 0 for i in range(len(lines))]


def test_a_stage_that_fails_for_everybody_is_raised():
    pipe, ended = pipes.pipe(), []

    def fault(requests):
        raise ZeroDivisionError("all of them")

    pipe.stages["verify"] = Faulty(None, fault)
    lines = [PromptLine(i, [4], PARAMS) for i in range(50)]
    with pytest.raises(ZeroDivisionError):
        ended.extend(run(pipe, lines))
    assert len(ended) <= MOST_CONTAINED
    assert not pipe.state.waiting
    assert not pipe.state.running


def test_an_exception_is_raised_unless_it_is_to_be_contained():
    pipe = pipes.pipe()
    pipe.submit([4], PARAMS)
    own = pipe.stages["verify"]

    def broken(state, adjusted):
        raise ZeroDivisionError

    pipe.stages["verify"] = broken
    with pytest.raises(ZeroDivisionError):
        pipe.step()
    pipe.stages["verify"] = own
    (rollout,) = pipe.stream()
    assert rollout.ok


# --- jobs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    return write(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the job comes to where nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    run_job(folder / "job", write(folder / "prompts.jsonl", PROMPTS))
    return rollouts_of(folder / "job")


@pytest.mark.parametrize(
    ("function", "fatal"),
    [*((f, n) for f in ("replace", "write_table") for n in (1, 3)), *(("fsync", n) for n in range(1, 8))],
)
def test_a_full_disk_stops_the_job_and_harms_nothing(tmp_path, prompts, whole, monkeypatch, function, fatal):
    module = pq if function == "write_table" else os
    own, count = getattr(module, function), []

    def full(*arguments, **options):
        count.append(1)
        if len(count) == fatal:
            raise OSError(errno.ENOSPC, "No space left on device")
        return own(*arguments, **options)

    folder, pipe = tmp_path / "job", pipes.pipe(max_batch=3, max_length=64)
    monkeypatch.setattr(module, function, full)
    with pytest.raises(OSError, match="No space left on device"):
        run_job(folder, prompts, pipe=pipe)
    monkeypatch.undo()
    assert not pipe.has_work
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
    run_job(folder, prompts, pipe=pipe)
    assert_same_rollouts(rollouts_of(folder), whole)


def test_ctrl_c_leaves_a_job_to_go_on_with(tmp_path, prompts, whole, monkeypatch):
    pipe, count = pipes.pipe(max_batch=3, max_length=64), []

    def interrupt(record):
        count.append(1)
        if len(count) in (2, 9):
            raise KeyboardInterrupt

    pipe.observe("verify", interrupt)
    for _ in range(2):
        with Job(tmp_path / "job", prompts, JOB_PARAMS, shard_size=4) as job, pytest.raises(KeyboardInterrupt):
            job.run(pipe, progress=False)
        assert not pipe.has_work
    run_job(tmp_path / "job", prompts, pipe=pipe)
    assert_same_rollouts(rollouts_of(tmp_path / "job"), whole)


def test_a_fault_is_in_the_job_s_records(tmp_path, prompts, whole):
    pipe = pipes.pipe(max_batch=3, max_length=64)

    def fault(requests):
        if 4 in names(requests):
            raise torch.OutOfMemoryError("CUDA out of memory")

    pipe.stages["forward"] = Faulty(pipe.stages["forward"], fault)
    summary = run_job(tmp_path / "job", prompts, pipe=pipe)
    found = rollouts_of(tmp_path / "job")
    assert [r.prompt_index for r in found if r.error] == [4]
    assert summary.num_failed == 1
    (reason,) = summary.failures
    assert summary.examples[reason] == ["p4"]
    assert found[6].error == reason == "out of memory alone in the batch: OutOfMemoryError: CUDA out of memory"
    for one, other in zip(found, whole, strict=True):
        assert one.error or one.token_ids.tolist() == other.token_ids.tolist()


def test_a_busy_pipeline_is_refused(tmp_path, prompts):
    pipe = pipes.pipe(max_batch=3, max_length=64)
    pipe.submit([1], PARAMS)
    with pytest.raises(InvalidRequest, match="expected an idle pipeline"):
        run_job(tmp_path / "job", prompts, pipe=pipe)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), ZeroDivisionError("four")])
def test_faults_with_an_engine(speculative, clean, error):
    """It launches a round before it reads the last one; what was on its way is dropped and done again."""
    pipe, count = pipes.pipe(speculative, engine="overlapped"), []

    def fault(requests):
        count.append(1)
        if 4 in names(requests):
            raise error

    pipe.stages["finish"] = Faulty(pipe.stages["finish"], fault)
    assert_only_failed(finished(pipe), clean, {4}, str(error))
    assert pipe._engine is not None
    assert count


def test_a_job_with_an_engine(tmp_path, prompts, whole):
    pipe = pipes.pipe(max_batch=3, max_length=64, engine="overlapped")
    run_job(tmp_path / "job", prompts, pipe=pipe)
    found = rollouts_of(tmp_path / "job")
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in whole]
    with pytest.raises(InvalidRequest, match=r"engine='auto', expected 'overlapped'.*options sha256="):
        run_job(tmp_path / "job", prompts, pipe=pipes.pipe(max_batch=3, max_length=64))
