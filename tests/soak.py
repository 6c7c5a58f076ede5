"""A long day in short: ``python -m tests.soak --requests 100000``, many small requests of every kind.

Some are refused, cancelled, stopped by a token or a string, too wide for `max_support`, or given NaN by a processor;
rounds run out of memory and fail. Every sample must end exactly once, and nothing may stay: neither objects, nor memory
of the host or the device.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter

import numpy as np
import psutil
import torch

from pipeline import InvalidRequest, SamplingParams, SpeculativePipeline
from pipeline.batch.request import Request
from tests import engines, pipes

OVERFLOWS = 12
"""`max_support` of a soaked pipeline."""
MOST_MORE_BYTES = 48 << 20
"""Host memory that a process may take beyond what it had after a fifth of the requests: allocators' slack."""
MOST_MORE_OBJECTS = 5000
MOST_MORE_DEVICE_BYTES = 1 << 20
"""Device memory beyond that: of shapes that come up late."""


class Faults:
    """In a stage's place: now and then there is no memory, or something else goes wrong, at random."""

    def __init__(self, stage, rng):
        self.stage, self.rng, self.count = stage, rng, 0

    def __call__(self, state, record):
        if self.rng.random() < 0.002:
            self.count += 1
            raise self.rng.choice([torch.OutOfMemoryError("CUDA out of memory"), OSError("a hiccup")])
        return self.stage(state, record)


OPTIONS = {"max_batch": 16, "max_length": 64, "max_support": OVERFLOWS}
VOCABULARY = 31


def pipe_of(speculative):
    """A pipeline to soak, on the CPU."""
    return pipes.pipe(speculative, VOCABULARY, **OPTIONS)


def engine_of():
    """A pipeline whose engine is soaked: with graphs where there is a device."""
    place = ("graphs", "cuda") if torch.cuda.is_available() else ("overlapped", "cpu")
    return engines.pipe("dflash", *place, VOCABULARY, **OPTIONS)


ARMS = (
    ("ordinary", lambda: pipe_of(False), "forward"),
    ("dflash", lambda: pipe_of(True), "forward"),
    ("engine", engine_of, "finish"),
)
"""What is soaked: name, pipeline, the stage that has faults."""


def poison(ids, scores):
    """A processor with a fault."""
    return scores * torch.nan


def request(rng, vocabulary, has_tokenizer):
    """A prompt and its parameters, of every kind."""
    prompt = rng.integers(0, vocabulary, rng.integers(1, 12)).tolist()
    if rng.random() < 0.04:
        prompt[-1] = vocabulary + 5
    params = {
        "max_new_tokens": int(rng.integers(1, 8)),
        "temperature": float(rng.choice([0.0, 0.7, 1.0, 5.0])),
        "top_k": int(rng.choice([1, 5, 10, 25])),
        "top_p": float(rng.choice([1.0, 0.95, 0.5])),
        "n": int(rng.choice([1, 1, 1, 2, 3])),
        "return_sampling_mask": bool(rng.random() < 0.7),
        "sampling_logprobs": str(rng.choice(["selected", "support"])),
        "top_logprobs": int(rng.choice([0, 0, 3])),
        "presence_penalty": float(rng.choice([0.0, 0.0, 0.5])),
    }
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.integers(0, vocabulary, 3).tolist()
    if has_tokenizer and rng.random() < 0.1:
        params["stop"] = [f"w{rng.integers(4, vocabulary)}"]
    if rng.random() < 0.04:
        params["logits_processors"] = [poison]
    if rng.random() < 0.5:
        params["seed"] = int(rng.integers(1 << 63))
    return prompt, SamplingParams(**params)


def soak(pipe: SpeculativePipeline, num_requests: int, seed: int = 0, faulty: str = "forward") -> Counter[str]:
    """Run the requests; how many samples ended how. Raises AssertionError for one that is lost, doubled or torn.

    faulty: the stage that has faults. An engine goes on only where it is "finish".
    """
    rng = np.random.default_rng(seed)
    pipe.stages[faulty] = Faults(pipe.stages[faulty], rng)
    vocabulary, has_tokenizer = pipe.state.target.vocab_size, pipe.state.target.tokenizer is not None
    left, ends, early, others = {}, Counter(), None, _held()["requests"]
    submitted = 0
    while submitted < num_requests or pipe.has_work:
        while submitted < num_requests and len(pipe.state.waiting) < 2 * pipe.state.options.max_batch:
            submitted += 1
            prompt, params = request(rng, vocabulary, has_tokenizer)
            try:
                left[pipe.submit(prompt, params)] = set(range(params.n))
            except InvalidRequest:
                ends["refused"] += 1
        if left and rng.random() < 0.1:
            pipe.cancel(int(rng.choice(list(left))))
        for rollout in pipe.step(contain=True).rollouts:
            left[rollout.prompt_index].remove(rollout.sample_index)  # KeyError: ended twice
            if not left[rollout.prompt_index]:
                del left[rollout.prompt_index]
            ends[_end(rollout)] += 1
        if early is None and submitted >= num_requests // 5:
            early = _held()
    assert not left, f"{len(left)} prompts never ended"
    pipe.stages[faulty] = pipe.stages[faulty].stage
    late = _held()
    # An engine knows the last request of every slot.
    assert late["requests"] <= others + pipe.state.options.max_batch, "requests outlive their end"
    assert late["objects"] <= early["objects"] + MOST_MORE_OBJECTS, f"{early} became {late}"
    assert late["host"] <= early["host"] + MOST_MORE_BYTES, f"{early} became {late}"
    assert late["device"] <= early["device"] + MOST_MORE_DEVICE_BYTES, f"{early} became {late}"
    return ends


def _end(rollout):
    """How it ended, after a look at whether it is whole."""
    n = len(rollout.token_ids)
    if rollout.error is not None:
        assert n == 0
        assert rollout.sampling_mask is None
        return rollout.error.split(":")[0].split(" ")[0].lower()
    assert rollout.logprobs is None or len(rollout.logprobs) == n
    assert rollout.sampling_mask is None or len(rollout.sampling_mask) == n
    assert rollout.sampling_mask is None or rollout.sampling_mask.sizes.max(initial=0) <= OVERFLOWS
    assert rollout.top_logprobs is None or len(rollout.top_logprobs.ids) == n
    return rollout.finish_reason


def _held():
    gc.collect()
    objects = gc.get_objects()
    return {
        "requests": sum(type(one) is Request for one in objects),
        "objects": len(objects),
        "host": psutil.Process().memory_info().rss,
        "device": on_device(),
    }


def on_device():
    """Bytes in use on the CUDA device: tensors, and the kernels' arrays, which CuPy's pool holds."""
    if not torch.cuda.is_available():
        return 0
    import cupy

    return torch.cuda.memory_allocated() + cupy.get_default_memory_pool().used_bytes()


def main():
    parser = argparse.ArgumentParser(description="Many requests of every kind; every one ends once, and nothing leaks.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make, faulty in ARMS:
        pipe = make()
        started = time.perf_counter()
        ends = soak(pipe, options.requests // len(ARMS), options.seed, faulty)
        seconds = time.perf_counter() - started
        print(f"{name}: {ends.total()} samples in {seconds:.0f} s")
        for end, count in ends.most_common():
            print(f"  {count:8d} {end}")


if __name__ == "__main__":
    main()
