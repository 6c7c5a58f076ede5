"""One shard of a job: its prompts to a file of rollouts."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from model_loaders.files import sha256_of
from pipeline.jobs.folder import JobFolder
from pipeline.jobs.journal import Entry
from pipeline.jobs.running import run
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import SamplingParams
from pipeline.prompt_file import PromptLine, Shard
from pipeline.results.rollout import Rollout
from pipeline.results.rollouts import Rollouts
from pipeline.results.summary import Summary
from pipeline.running.provenance import describe


def make_shard(
    pipe: SpeculativePipeline,
    folder: JobFolder,
    index: int,
    shard: Shard,
    lines: list[PromptLine],
    *,
    seed: int,
    provenance: dict[str, Any],
    finished: Callable[[int, int], None] = lambda samples, tokens: None,
) -> Entry:
    """Generate for a shard's prompts and write its file; returns what the journal is to say of it.

    Args:
        index: The shard's; `lines` are its prompts.
        seed: The job's.
        provenance: More for the file's metadata.
        finished: Called with the samples and tokens of every prompt that ended.

    Raises:
        OSError: The file can't be written.
        Exception: See `run`.
    """
    started, clock = time.time(), time.perf_counter()
    summary, held = Summary(), list[tuple[SamplingParams, Rollout]]()

    def seeded(params: SamplingParams, prompt: int) -> SamplingParams:
        return params if params.seed is not None else replace(params, seed=request_seed(seed, prompt))

    for line, rollouts in run(pipe, lines, first=shard.first, seeded=seeded):
        held += [(line.params, rollout) for rollout in rollouts]
        summary.add(rollouts, f"line {line.number}" if line.id is None else line.id)
        finished(len(rollouts), sum(len(rollout.token_ids) for rollout in rollouts))
    held.sort(key=lambda pair: (pair[1].prompt_index, pair[1].sample_index))
    numbers: dict[SamplingParams, int] = {}
    numbered = [replace(rollout, params_index=numbers.setdefault(params, len(numbers))) for params, rollout in held]
    described = describe(pipe.state, pipe.capabilities, list(numbers)) | provenance | {"shard": index}
    path = Rollouts(numbered, described).to_parquet(folder.shard(index))
    return Entry(
        shard=index,
        file=path.name,
        size=path.stat().st_size,
        sha256=sha256_of(path),
        summary=summary.to_dict(),
        worker=f"{socket.gethostname()}:{os.getpid()}",
        started=started,
        seconds=time.perf_counter() - clock,
    )


def request_seed(job_seed: int, prompt: int) -> int:
    """A prompt's seed where the parameters have none: 64 bits of BLAKE2b over the job's seed and the prompt's index."""
    content = job_seed.to_bytes(8, "little") + prompt.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"specmask").digest(), "little")
