"""Filter, verify and capture on the CPU: the kernels of gpu/ against the same work in torch.

    python -m benchmarks.filter_cpu [--threads 2] [--repeats 5]

8 requests of 8 rows over 151,936 tokens, float32, N(0, 3). Both sides give the support of every row, the
tokens committed (target-only verification) and the captured masks. Writes benchmarks/results/filter_cpu.json.
"""

import argparse
import os
import statistics
import time

import numba
import numpy as np
import torch

from benchmarks.report import write
from gpu import capture_masks, select_support, verify_chain

REQUESTS, WIDTH, VOCABULARY = 8, 8, 151_936
MAX_SUPPORT = 16_384
SETTINGS = {
    "top_k=64, top_p=0.95": (64, 0.95),
    "top_k=1024, top_p=0.95": (1024, 0.95),
    "top_p=0.95": (0, 0.95),
    "unfiltered": (0, 1.0),
}


def ours(case, top_k, top_p, wanted):
    rows = REQUESTS * WIDTH
    support = select_support(
        case["logits"].reshape(rows, VOCABULARY),
        np.ones(rows, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        capacity=4096,
    )
    verdict = verify_chain(case["logits"], support, case["drafts"], case["num_drafts"], case["accept"], case["draw"])
    capture = capture_masks(case["logits"], support, verdict, wanted, MAX_SUPPORT)
    return verdict.tokens, capture.counts.sum(), capture.token_ids.size


def in_torch(case, top_k, top_p, wanted):
    """softmax, sort, cumsum, mask, renormalise, gather: as samplers write it (ties by position)."""
    logits = torch.from_numpy(case["logits"]).reshape(REQUESTS * WIDTH, VOCABULARY)
    probs = torch.softmax(logits, -1)
    if top_k or top_p < 1:
        values, ids = probs.sort(-1, descending=True)
        if top_k:
            values[:, top_k:] = 0
            values /= values.sum(-1, keepdim=True)
        if top_p < 1:
            values[values.cumsum(-1) - values >= top_p] = 0
        probs = torch.zeros_like(probs).scatter_(-1, ids, values)
        probs /= probs.sum(-1, keepdim=True)
    probs = probs.reshape(REQUESTS, WIDTH, VOCABULARY)
    drafts = torch.from_numpy(case["drafts"]).long()
    chance = probs[:, :-1].gather(-1, drafts[..., None])[..., 0]
    kept = (torch.from_numpy(case["accept"])[:, :-1] < chance).long().cumprod(-1).sum(-1)
    tokens = torch.full((REQUESTS, WIDTH), -1)
    entries = 0
    for b, accepted in enumerate(kept.tolist()):
        tokens[b, :accepted] = drafts[b, :accepted]
        last = probs[b, accepted]
        law = last.clone()
        if accepted < WIDTH - 1:
            law[drafts[b, accepted]] = 0
        cdf = law.cumsum(-1, dtype=torch.float64)
        tokens[b, accepted] = torch.searchsorted(cdf, case["draw"][b, accepted] * cdf[-1], right=True)
        if wanted[b]:
            for i in range(accepted + 1):
                ids = probs[b, i].nonzero()[:, 0]
                if ids.numel() <= MAX_SUPPORT:
                    entries += ids.numel()
                    probs[b, i][ids].log()
    return tokens.numpy(), entries, entries


def inputs():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(REQUESTS, WIDTH, VOCABULARY)).astype(np.float32)
    return {
        "logits": logits,
        "drafts": logits.argmax(-1)[:, :-1].astype(np.int32),
        "num_drafts": np.full(REQUESTS, WIDTH - 1, np.int32),
        "accept": rng.random((REQUESTS, WIDTH)) * 0.3,  # low coins: several drafts are kept
        "draw": rng.random((REQUESTS, WIDTH)),
    }


def measure(function, *arguments, repeats):
    function(*arguments)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return {"best_ms": round(min(times) * 1e3, 3), "median_ms": round(statistics.median(times) * 1e3, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    numba.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    case, wanted = inputs(), np.ones(REQUESTS, bool)
    results = {}
    for name, (top_k, top_p) in SETTINGS.items():
        mine = measure(ours, case, top_k, top_p, wanted, repeats=4 * options.repeats)
        theirs = measure(in_torch, case, top_k, top_p, wanted, repeats=max(1, options.repeats // 2))
        same = (ours(case, top_k, top_p, wanted)[0] == in_torch(case, top_k, top_p, wanted)[0]).mean()
        ratio = theirs["median_ms"] / mine["median_ms"]
        results[name] = {
            "specmask": mine,
            "torch": theirs,
            "times_faster": round(ratio, 1),
            "tokens_equal_to_torch": round(float(same), 4),
        }
        medians = f"specmask {mine['median_ms']:8.2f} ms   torch {theirs['median_ms']:8.1f} ms"
        print(f"{name:24} {medians}   {ratio:6.1f}x")
    write(
        "filter_cpu",
        {
            "work": f"{REQUESTS} x {WIDTH} rows x {VOCABULARY}, float32: select, verify, capture",
            "threads": options.threads,
            "threading_layer": numba.threading_layer(),
            "results": results,
        },
    )


if __name__ == "__main__":
    main()
