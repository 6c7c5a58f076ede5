"""Tokens a second of one job on one worker, and on several, each with a GPU of its own.

    python -m benchmarks.scaling [--target demo] [--draft demo] [--workers 1 2] [--launcher processes | ray]
                                 [--shards 16] [--shard-size 128] [--max-batch 128] [--tokens 256] [--device auto]
                                 [--seconds 90] [--results FOLDER]

Every number of workers makes the same requests (EOS ignored, masks recorded), in shards, and the tokens of every sample
are compared with those of the fewest workers'.

`--launcher processes` starts the most workers once, on the GPUs of CUDA_VISIBLE_DEVICES in turn (all by default). Each
loads its pipeline and generates a shard's worth twice, so that kernels are compiled and graphs captured: its start-up.
Then the jobs run one after another, the smaller ones on the first workers, while the others wait. A rate is the job's
tokens over the time from its first order to its last result; "with start-up" that time and the start-up of the slowest
of its workers are counted.

`--launcher ray` is `pipeline.jobs.on_ray`: a rate leaves out each worker's first shard and the time before its end,
"with start-up" is over the whole call.

A job that isn't through `--seconds` after its first order is cut: its rate is of the shards that were made.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import RESULTS, write
from benchmarks.scaling_workers import Workers
from pipeline import Rollouts, SamplingParams
from pipeline.demo import QUESTIONS
from pipeline.jobs import Job
from pipeline.jobs.on_ray import run_on_ray

Run = Callable[[Job, int], dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs, print the rates and their ratios, write the result; how many failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo", help="none: ordinary decoding")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shards", type=int, default=16, help="of the job")
    parser.add_argument("--shard-size", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--launcher", choices=("ray", "processes"), default="processes")
    parser.add_argument("--seconds", type=float, default=90, help="a job gives out no shard after this long")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--vocabulary", type=int, help="prompts of token ids below it, for a target without a template")
    options = parser.parse_args(arguments)

    load = {
        "target": options.target,
        "draft": None if options.draft == "none" else options.draft,
        "device": options.device,
        "max_batch": options.max_batch,
        "max_length": 1024,
    }
    params = SamplingParams(
        temperature=1.0, top_k=64, top_p=0.95, seed=None, max_new_tokens=options.tokens, ignore_eos=True,
        return_sampling_mask=True,
    )  # fmt: skip
    gpus = visible_gpus() if options.device in ("auto", "cuda") else []
    names = ("target", "draft", "shards", "shard_size", "max_batch", "tokens", "device", "launcher")
    figures: dict[str, Any] = {name: getattr(options, name) for name in names}
    figures |= {"gpus": len(gpus), "jobs": {}, "errors": {}}
    workers: Workers | None = None
    try:
        run: Run = lambda job, count: on_ray(job, load, count, bool(gpus))  # noqa: E731
        if options.launcher == "processes":
            warm_up = [prompt(i, options.vocabulary) for i in range(options.shard_size)]
            asked = [one.get("messages") or one["token_ids"] for one in warm_up]
            workers = Workers(max(options.workers), load, (asked, params), gpus, options.seconds)
            print(f"ready after {', '.join(f'{seconds:.1f}' for seconds in workers.startup_seconds)} s", flush=True)
            run = lambda job, count: in_processes(workers, job, count)  # noqa: E731
        with tempfile.TemporaryDirectory() as work:
            prompts = write_prompts(
                Path(work) / "prompts.jsonl", options.shards * options.shard_size, options.vocabulary
            )
            first: Path | None = None
            for count in sorted(options.workers):
                folder = Path(work) / f"job-{count}"
                try:
                    with Job(folder, prompts, params, shard_size=options.shard_size) as job:
                        found = run(job, count) | {"tokens": job.summary.num_tokens, "missing": len(job.missing)}
                        found["failed_samples"] = job.summary.num_failed
                    if first is None:
                        first = folder
                    compared, different = compare(first, folder)
                    found |= {"compared_samples": compared, "different_samples": different}
                    figures["jobs"][str(count)] = found
                except Exception as error:
                    traceback.print_exc()
                    figures["errors"][str(count)] = f"{type(error).__name__}: {error}"[:2000]
                figures["ratios"] = ratios(figures["jobs"])
                write("scaling", figures, options.results)
                print(f"{count} workers: {figures['jobs'].get(str(count), 'failed')}", flush=True)
    except Exception as error:  # the workers' start
        traceback.print_exc()
        figures["errors"]["start"] = f"{type(error).__name__}: {error}"[:2000]
    finally:
        if workers is not None:
            workers.close()
    print(f"{figures.get('ratios')}\nwritten to {write('scaling', figures, options.results)}")
    return len(figures["errors"])


def visible_gpus() -> list[str]:
    """What each worker's CUDA_VISIBLE_DEVICES may be."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]


def prompt(index: int, vocabulary: int | None) -> dict[str, Any]:
    """What a line of the prompts file asks."""
    if vocabulary is not None:
        return {"token_ids": [(7 * index + 3 * j + index * j) % vocabulary for j in range(5 + index % 8)]}
    return {"messages": [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]}


def write_prompts(path: Path, count: int, vocabulary: int | None = None) -> Path:
    """Prompts with seeds of their own, so that every job has the same requests."""
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps(prompt(i, vocabulary) | {"params": {"seed": i}}) + "\n")
    return path


def in_processes(workers: Workers, job: Job, count: int) -> dict[str, float]:
    """The job on the first `count` of the workers."""
    seconds, startup = workers.run(job, count), max(workers.startup_seconds[:count])
    tokens = job.summary.num_tokens
    return {
        "seconds": seconds,
        "startup_seconds": startup,
        "tokens_per_second": tokens / seconds,
        "with_startup": tokens / (seconds + startup),
    }


def on_ray(job: Job, load: dict[str, Any], count: int, on_gpus: bool) -> dict[str, float]:
    """The job as the library runs it on Ray."""
    started = time.perf_counter()
    run_on_ray(job, load, num_workers=count, gpus_per_worker=1 if on_gpus else 0)
    seconds = time.perf_counter() - started
    rate = steady_rate(job.folder.path / "journal.jsonl", count)
    return {"seconds": seconds, "tokens_per_second": rate, "with_startup": job.summary.num_tokens / seconds}


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


def ratios(jobs: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each job's rates over those of the fewest workers."""
    if not jobs:
        return {}
    base = jobs[min(jobs, key=int)]
    rates = ("tokens_per_second", "with_startup")
    return {count: {name: one[name] / base[name] for name in rates} for count, one in jobs.items()}


def compare(one: Path, other: Path) -> tuple[int, int]:
    """Samples of the shards that both jobs have, and those of them whose tokens differ."""
    compared = different = 0
    for path in sorted(one.glob("*.parquet")):
        if not (other / path.name).exists():
            continue
        for a, b in zip(Rollouts.from_parquet(path), Rollouts.from_parquet(other / path.name), strict=True):
            compared += 1
            different += not np.array_equal(a.token_ids, b.token_ids)
    return compared, different


if __name__ == "__main__":
    raise SystemExit(main())
