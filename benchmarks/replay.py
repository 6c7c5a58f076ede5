"""Replay over recorded supports against masking to -inf and log_softmax in torch: forward and backward.

    python -m benchmarks.replay [--tokens 4096] [--threads 2] [--repeats 3]
    python -m benchmarks.replay --device cuda [--into README.md]

Tokens x 151,936 float32 logits, N(0, 3), supports of 200. Each side runs in a process of its own, which starts with
the logits and ends with their gradient; extra memory is the peak of the process beyond the logits, with and without
the gradient, which both sides must make. The torch side needs four times the logits' memory (2.5 GB for 4,096 tokens)
and is run once. Writes benchmarks/results/replay.json. On a CUDA device (benchmarks/replay_cuda.py says how) it writes
replay_cuda.json, and with --into a table of it between a file's markers; --table does that with what was measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numba
import numpy as np
import torch

from benchmarks import replay_cuda
from benchmarks.report import RESULTS, insert_into, write
from pipeline import SamplingMask
from pipeline.replay import support_logprobs

VOCABULARY, SUPPORT = 151_936, 200
SIDES = ("specmask", "torch")


def inputs(tokens, device="cpu"):
    """Logits [tokens, V] as a leaf, a mask of random supports, the taken tokens."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(tokens, VOCABULARY, device=device).normal_(0, 3, generator=generator).requires_grad_()
    rng = np.random.default_rng(0)
    ids = np.stack([np.sort(rng.choice(VOCABULARY, SUPPORT, replace=False)) for _ in range(tokens)]).astype(np.int32)
    taken = ids[np.arange(tokens), rng.integers(0, SUPPORT, tokens)]
    offsets = np.arange(tokens + 1, dtype=np.int64) * SUPPORT
    return logits, SamplingMask(ids.ravel(), offsets, np.full(tokens, -1, np.float32), "selected"), taken


def in_torch(logits, mask, taken):
    """As trainers write it."""
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    rows = torch.arange(len(mask)).repeat_interleave(torch.from_numpy(mask.sizes))
    kept[rows, torch.from_numpy(mask.token_ids).long()] = True
    logprobs = torch.log_softmax(logits.masked_fill(~kept, -torch.inf), -1)
    return logprobs.gather(-1, torch.from_numpy(taken).long()[:, None])[:, 0]


def ours(logits, mask, taken):
    """The library's."""
    return support_logprobs(logits, mask, token_ids=taken)


def peak_bytes():
    """The process's largest resident size since it was last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def run_side(side, options):
    """One side, in this process: prints its figures, saves its log-probabilities and a part of the gradient."""
    numba.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    function = ours if side == "specmask" else in_torch
    small = inputs(4)
    function(*small).sum().backward()  # compiled, and the libraries' own buffers are there
    logits, mask, taken = inputs(options.tokens)
    weights = torch.linspace(-1, 1, options.tokens)
    Path("/proc/self/clear_refs").write_text("5")
    before, times = peak_bytes(), []
    for _ in range(options.repeats if side == "specmask" else 1):
        logits.grad = None
        start = time.perf_counter()
        logprobs = function(logits, mask, taken)
        (logprobs * weights).sum().backward()
        times.append(time.perf_counter() - start)
    extra = peak_bytes() - before
    rows = torch.arange(0, options.tokens, max(1, options.tokens // 64))
    np.savez(options.save, logprobs=logprobs.detach().numpy(), grad=logits.grad[rows].numpy())
    gradient = logits.numel() * logits.element_size()
    figures = {
        "median_s": round(statistics.median(times), 3),
        "runs": len(times),
        "extra_mb": round(extra / 1e6, 1),
        "extra_mb_without_the_gradient": round((extra - gradient) / 1e6, 1),
    }
    print(json.dumps(figures))


def start_side(side, options, save):
    """The same in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.replay", "--side", side, "--save", str(save)]
    command += [f"--{name}={getattr(options, name)}" for name in ("tokens", "threads", "repeats")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def on_cuda(tokens, repeats):
    """The report of a CUDA device, written."""
    inputs_ = inputs(tokens, "cuda")
    figures = {"work": work(tokens), **replay_cuda.measure(*inputs_, repeats)}
    print(json.dumps(figures, indent=1))
    return write("replay_cuda", figures)


def work(tokens):
    """What is measured."""
    return f"{tokens} x {VOCABULARY} float32 logits, supports of {SUPPORT}: forward and backward"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, help="default 3, on CUDA 10")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured on CUDA instead")
    parser.add_argument("--into", type=Path, metavar="FILE", help="on CUDA: put the table between FILE's markers")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table or options.device == "cuda":
        path = RESULTS / "replay_cuda.json"
        if not options.table:
            if not torch.cuda.is_available():
                parser.exit(2, "device=none, expected a CUDA device for --device cuda\n")
            path = on_cuda(options.tokens, options.repeats or 10)
        elif not path.exists():
            parser.exit(2, f"results={path}, expected them there: run with --device cuda first\n")
        table = replay_cuda.table(json.loads(path.read_text()))
        insert_into(options.into, "replay", table) if options.into else print(table)
        return
    options.repeats = options.repeats or 3
    if options.side:
        run_side(options.side, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = {side: Path(folder) / f"{side}.npz" for side in SIDES}
        results = {side: start_side(side, options, saved[side]) for side in SIDES}
        ours_, theirs = (np.load(saved[side]) for side in SIDES)
        agree = {name: float(np.abs(ours_[name] - theirs[name]).max()) for name in ("logprobs", "grad")}
    mine, torchs = results["specmask"], results["torch"]
    figures = {
        "work": work(options.tokens),
        "threads": options.threads,
        "results": results,
        "times_faster": round(torchs["median_s"] / mine["median_s"], 1),
        "extra_memory_ratio": round(mine["extra_mb"] / torchs["extra_mb"], 3),
        "extra_memory_ratio_without_the_gradient": round(
            mine["extra_mb_without_the_gradient"] / torchs["extra_mb_without_the_gradient"], 3
        ),
        "largest_difference": agree,
    }
    print(json.dumps(figures, indent=1))
    write("replay", figures)


if __name__ == "__main__":
    main()
