"""Worker processes of one machine, a GPU each, that stay for several jobs: `pipeline.jobs` without Ray."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline import SamplingParams, SpeculativePipeline
from pipeline.jobs import Job
from pipeline.jobs.folder import JobFolder
from pipeline.jobs.journal import Entry
from pipeline.jobs.manifest import Manifest, pipeline_parts
from pipeline.jobs.on_ray import keywords_of
from pipeline.jobs.shards import make_shard
from pipeline.prompt_file import PromptReader

_AHEAD = 2
"""Shards that a worker is given at once, so that it never waits for the next."""
_WARM_UPS = 2
"""The first use of a shape compiles and allocates, the second captures its graph."""


class Workers:
    """`count` processes, each with a pipeline that has generated before it counts as ready.

    Args:
        count: Of processes.
        load: Arguments of `SpeculativePipeline.from_pretrained`, by name.
        warm_up: Prompts and parameters that each generates before anything is measured.
        gpus: The device that each sees, as CUDA_VISIBLE_DEVICES names it; empty: no GPUs.
        seconds: What the start may take, and then each job.

    Attributes:
        startup_seconds: From the start of a process until it was ready.

    Raises:
        RuntimeError: A worker failed, with its traceback; or the time was over.
    """

    def __init__(
        self,
        count: int,
        load: Mapping[str, Any],
        warm_up: tuple[list[Any], SamplingParams],
        gpus: Sequence[str],
        seconds: float,
    ):
        context = multiprocessing.get_context("spawn")
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._outbox = context.Queue()
        self._inboxes = [context.Queue() for _ in range(count)]
        prompts, params = warm_up
        shared = dict(load), prompts, keywords_of(params)
        self._processes = [
            context.Process(target=_work, args=(i, *shared, inbox, self._outbox), daemon=True)
            for i, inbox in enumerate(self._inboxes)
        ]
        started = time.perf_counter()
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            for i, process in enumerate(self._processes):
                if gpus:
                    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[i % len(gpus)]  # a process has it from its birth
                process.start()
        finally:
            if gpus and before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            elif before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = before
        self.startup_seconds = [0.0] * count
        for _ in range(count):
            worker, self.parts = self._receive()
            self.startup_seconds[worker] = time.perf_counter() - started

    def run(self, job: Job, count: int) -> float:
        """Make the job's missing shards on the first `count` workers; seconds from the first order to the last result.

        A job that there was no time for is left with shards missing.
        """
        job.begin(self.parts)
        waiting = list(reversed(job.missing))
        begun = str(job.folder.path), str(job.prompts), keywords_of(job.params), job.provenance
        started, self._deadline = time.perf_counter(), time.monotonic() + self._seconds
        out = 0
        for inbox in self._inboxes[:count]:
            inbox.put(begun)
        for _ in range(_AHEAD):
            for inbox in self._inboxes[:count]:
                if waiting:
                    inbox.put(waiting.pop())
                    out += 1
        while out:
            worker, line = self._receive()
            entry = Entry.read(line)
            assert entry is not None
            job.record(entry)
            out -= 1
            if waiting and time.monotonic() < self._deadline:
                self._inboxes[worker].put(waiting.pop())
                out += 1
        return time.perf_counter() - started

    def close(self) -> None:
        """End the processes."""
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def _receive(self) -> tuple[int, Any]:
        while True:
            try:
                worker, result, error = self._outbox.get(timeout=1)
            except queue.Empty:
                dead = [process.exitcode for process in self._processes if process.exitcode]
                if dead:
                    raise RuntimeError(f"a worker ended with {dead}, expected it to go on: see its output") from None
                if time.monotonic() > self._deadline + 30:
                    raise RuntimeError("no result in time: the workers are slower than --seconds allows") from None
                continue
            if error is not None:
                raise RuntimeError(error)
            return worker, result


def _work(
    number: int, load: dict[str, Any], prompts: list[Any], params: dict[str, Any], inbox: Any, outbox: Any
) -> None:
    try:
        torch.set_num_threads(1)
        pipe = SpeculativePipeline.from_pretrained(**load)
        for _ in range(_WARM_UPS):
            pipe.generate(prompts, SamplingParams(**params))
        outbox.put((number, pipeline_parts(pipe), None))
        for message in iter(inbox.get, None):
            if isinstance(message, tuple):
                name, file, own, provenance = message
                folder, reader = JobFolder(name), PromptReader(file, SamplingParams(**own))
                manifest = Manifest.read(folder.manifest)
                continue
            shard = manifest.shards[message]
            lines, seed = reader.read(shard), manifest.seed
            entry = make_shard(pipe, folder, message, shard, lines, seed=seed, provenance=provenance)
            outbox.put((number, entry.line(), None))
    except BaseException:
        outbox.put((number, None, traceback.format_exc()))
        raise
