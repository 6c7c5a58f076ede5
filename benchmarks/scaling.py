"""Tokens a second of one job on one worker, and on several, each with a GPU of its own.

    python -m benchmarks.scaling [--target demo] [--draft demo] [--workers 1 2] [--shards 12] [--device auto]

Every worker gets as many shards of equal requests (EOS ignored), so more workers get a longer job; its first shards
are those of the job for fewer. A worker's first shard, in which kernels are compiled and graphs captured, isn't
counted, nor is the loading: a rate is the tokens of the other shards over the time from the first of their starts to
the last of their ends. The tokens of shards that several jobs have are compared one by one.

`--launcher ray` is `pipeline.jobs.on_ray`; `processes` starts the same workers without Ray, on one machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import write
from pipeline import Rollouts, SamplingParams
from pipeline.demo import QUESTIONS
from pipeline.jobs import Job
from pipeline.jobs.journal import Entry
from pipeline.jobs.on_ray import ShardWorker, keywords_of, run_on_ray, worker_parts


def main() -> None:
    """Run the jobs, print the rates and their ratios, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo", help="none: ordinary decoding")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shards", type=int, default=12, help="a worker")
    parser.add_argument("--shard-size", type=int, default=512)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--launcher", choices=("ray", "processes"), default="ray")
    options = parser.parse_args()

    load = {
        "target": options.target,
        "draft": None if options.draft == "none" else options.draft,
        "device": options.device,
        "max_batch": options.max_batch,
        "max_length": 1024,
    }
    params = SamplingParams(
        temperature=1.0,
        top_k=64,
        top_p=0.95,
        seed=None,
        max_new_tokens=options.tokens,
        ignore_eos=True,
        return_sampling_mask=True,
    )
    on_gpus = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    run = on_ray if options.launcher == "ray" else in_processes
    rates, folders = {}, []
    with tempfile.TemporaryDirectory() as work:
        for workers in sorted(options.workers):
            prompts = write_prompts(Path(work) / f"{workers}.jsonl", workers * options.shards * options.shard_size)
            folder = Path(work) / f"job-{workers}"
            with Job(folder, prompts, params, shard_size=options.shard_size) as job:
                run(job, load, workers, on_gpus)
                assert not job.missing
                assert not job.summary.num_failed
            rates[workers] = steady_rate(folder / "journal.jsonl", workers)
            folders.append(folder)
            print(f"{workers} workers: {rates[workers]:.0f} tokens/s", flush=True)
        different = [num_different(folders[0], folder) for folder in folders[1:]]
    first = min(rates)
    ratios = {workers: rate / rates[first] for workers, rate in rates.items()}
    for workers, differ in zip(sorted(rates)[1:], different, strict=True):
        print(f"{workers} workers: {ratios[workers]:.2f} times {first}; {differ} shared samples with other tokens")
    figures = vars(options) | {"tokens_per_second": rates, "ratio": ratios, "different_samples": different}
    print(f"written to {write('scaling', figures | {'gpus': torch.cuda.device_count()})}")


def write_prompts(path: Path, count: int) -> Path:
    """Chats with seeds of their own, so that jobs of any size have the same first requests."""
    with path.open("w") as file:
        for i in range(count):
            line = {"messages": [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}], "params": {"seed": i}}
            file.write(json.dumps(line) + "\n")
    return path


def on_ray(job: Job, load: Mapping[str, Any], workers: int, on_gpus: bool) -> None:
    """The job as the library runs it on Ray."""
    run_on_ray(job, load, num_workers=workers, gpus_per_worker=1 if on_gpus else 0)


def in_processes(job: Job, load: Mapping[str, Any], workers: int, on_gpus: bool) -> None:
    """The same workers in processes of this machine, shard i to worker i modulo their number."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        job.begin(pool.apply(worker_parts, (dict(load),)))
    made_of = (str(job.folder.path), str(job.prompts), keywords_of(job.params), dict(load), job.provenance)
    lines = context.Queue()
    started = [
        context.Process(target=_work, args=(made_of, job.missing[i::workers], i if on_gpus else None, lines))
        for i in range(workers)
    ]
    for process in started:
        process.start()
    while job.missing:
        try:
            entry = Entry.read(lines.get(timeout=5))
        except queue.Empty:
            if any(process.exitcode for process in started):
                raise SystemExit("a worker ended early, expected it to make its shards: see its traceback") from None
            continue
        assert entry is not None
        job.record(entry)
    for process in started:
        process.join()


def _work(made_of: tuple[Any, ...], shards: list[int], gpu: int | None, lines: Any) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # before anything asks CUDA
    worker = ShardWorker(*made_of)
    for shard in shards:
        lines.put(worker.make(shard).line())


def steady_rate(journal: Path, workers: int) -> float:
    """Tokens a second of all shards but each worker's first."""
    by_worker: dict[str, list[dict[str, Any]]] = {}
    for line in journal.read_text().splitlines():
        entry = json.loads(line)
        by_worker.setdefault(entry["worker"], []).append(entry)
    assert len(by_worker) == workers, f"{len(by_worker)} of {workers} workers did anything"
    counted = [
        entry for entries in by_worker.values() for entry in sorted(entries, key=lambda entry: entry["started"])[1:]
    ]
    began = min(entry["started"] for entry in counted)
    ended = max(entry["started"] + entry["seconds"] for entry in counted)
    return sum(entry["summary"]["num_tokens"] for entry in counted) / (ended - began)


def num_different(one: Path, other: Path) -> int:
    """Samples of the shards that both jobs have, with other tokens in one than in the other."""
    different = 0
    for path in sorted(one.glob("*.parquet")):
        pairs = zip(Rollouts.from_parquet(path), Rollouts.from_parquet(other / path.name), strict=True)
        different += sum(not np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)
    return different


if __name__ == "__main__":
    main()
