"""The CUDA side of benchmarks.replay: both ways of replaying, on one device, in one process.

Two starts. "prepared": what doesn't depend on the logits lies on the device already, for the library as `Supports`, for
torch as a dense mask of what is dropped; its memory counts. "from the host": with every pass the recorded mask is
checked (by the library alone) and brought to the device. Times are medians of events around forward and backward, the
host's work between them included; extra memory is the allocator's peak beyond the logits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipeline import SamplingMask
from pipeline.replay import Supports, support_logprobs

Logprobs = Callable[[torch.Tensor], torch.Tensor]
WAYS = ("specmask", "torch")
STARTS = ("prepared", "from the host")
_WARM_UP = 2


def prepare(way: str, start: str, mask: SamplingMask, taken: np.ndarray, vocabulary: int) -> Logprobs:
    """What is to be measured: logits to log-probabilities [n], on the logits' device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if way == "specmask":
        if start == "prepared":
            return Supports.of(mask, vocab_size=vocabulary, token_ids=taken, device=device).logprobs
        return lambda logits: support_logprobs(logits, mask, token_ids=taken)
    if start == "prepared":
        dropped, ids = _dense(mask, taken, vocabulary, device)
        return lambda logits: _log_softmax(logits, dropped, ids)
    return lambda logits: _log_softmax(logits, *_dense(mask, taken, vocabulary, device))


def _dense(mask: SamplingMask, taken: np.ndarray, vocabulary: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    # The ids travel as they were recorded, and become indices on the device.
    dropped = torch.ones(len(mask), vocabulary, dtype=torch.bool, device=device)
    sizes = torch.from_numpy(mask.sizes).to(device)
    rows = torch.arange(len(mask), device=device).repeat_interleave(sizes, output_size=len(mask.token_ids))
    dropped[rows, torch.from_numpy(mask.token_ids).to(device).long()] = False
    return dropped, torch.from_numpy(taken).to(device).long()


def _log_softmax(logits: torch.Tensor, dropped: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """As trainers write it."""
    return torch.log_softmax(logits.masked_fill(dropped, -torch.inf), -1).gather(-1, taken[:, None])[:, 0]


def measure(logits: torch.Tensor, mask: SamplingMask, taken: np.ndarray, repeats: int) -> dict[str, Any]:
    """Figures of every way and start, and how far the ways are apart. The logits are a leaf on a CUDA device."""
    weights = torch.linspace(-1, 1, len(logits), device=logits.device)
    rows = torch.arange(0, len(logits), max(1, len(logits) // 64), device=logits.device)
    results: dict[str, dict[str, Any]] = {start: {} for start in STARTS}
    kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for start in STARTS:
        for way in WAYS:
            logits.grad = None
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            logprobs_of = prepare(way, start, mask, taken, logits.shape[1])
            times = [_one_pass(logprobs_of, logits, weights) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
            extra = torch.cuda.max_memory_allocated() - before
            gradient = logits.numel() * logits.element_size()
            results[start][way] = {
                name: round(statistics.median(one[name] for one in times), 3)
                for name in ("total_ms", "forward_ms", "backward_ms")
            } | {
                "runs": repeats,
                "extra_mb": extra / 1e6,  # not rounded: a small case's ratio needs its bytes
                "extra_mb_without_the_gradient": (extra - gradient) / 1e6,
            }
            assert logits.grad is not None
            kept[way] = logprobs_of(logits.detach()), logits.grad[rows]
            del logprobs_of
    logits.grad = None
    differences = {
        name: float((kept["specmask"][i] - kept["torch"][i]).abs().max()) for i, name in enumerate(("logprobs", "grad"))
    }
    return {"results": results, "ratios": ratios(results), "largest_difference": differences}


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The library's against torch's, start by start."""
    return {
        start: {
            "times_faster": round(ways["torch"]["total_ms"] / ways["specmask"]["total_ms"], 1),
            "extra_memory": round(ways["specmask"]["extra_mb"] / ways["torch"]["extra_mb"], 3),
            "extra_memory_without_the_gradient": round(
                ways["specmask"]["extra_mb_without_the_gradient"] / ways["torch"]["extra_mb_without_the_gradient"], 4
            ),
        }
        for start, ways in results.items()
    }


def _one_pass(logprobs_of: Logprobs, logits: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    logits.grad = None
    torch.cuda.synchronize()
    begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    logprobs = logprobs_of(logits)
    middle.record()
    (logprobs * weights).sum().backward()
    end.record()
    end.synchronize()
    return {
        "total_ms": begin.elapsed_time(end),
        "forward_ms": begin.elapsed_time(middle),
        "backward_ms": middle.elapsed_time(end),
    }


def table(report: dict[str, Any]) -> str:
    """The Markdown of a report that benchmarks.report has written."""
    figures, machine = report["figures"], report["machine"]
    lines = [
        f"{figures['work']}; {machine['gpu']}, driver {machine['driver']}, torch {report['versions']['torch']}, "
        f"{report['date']}, commit {report['commit']}:",
        "",
        "| | forward, ms | backward, ms | both, ms | extra memory, MB | without the gradient |",
        "|---|---|---|---|---|---|",
    ]
    for start, ways in figures["results"].items():
        for way, one in ways.items():
            cells = [f"{one[name]:.2f}" for name in ("forward_ms", "backward_ms", "total_ms")]
            cells += [f"{one[name]:,.0f}" for name in ("extra_mb", "extra_mb_without_the_gradient")]
            lines.append(f"| {way}, {start} | " + " | ".join(cells) + " |")
        ratio = figures["ratios"][start]
        lines.append(
            f"| specmask against torch | | | {ratio['times_faster']} x faster | {ratio['extra_memory']:.2f} x | "
            f"{ratio['extra_memory_without_the_gradient']:.3f} x |"
        )
    return "\n".join(lines)
