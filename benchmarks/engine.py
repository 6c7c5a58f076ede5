"""The engine on a CUDA device: ordinary and speculative decoding, recording in four ways, beside transformers itself.

    python -m benchmarks.engine [--target demo] [--draft demo ...] [--batches 1 8 32] [--tokens 256] [--repeats 3]
                                [--temperature 1.0] [--compile] [--peers 8] [--peer-tokens 64] [--compiled-peer]
                                [--on-off-rounds 6] [--soak 98304] [--brief]

Settings of an arm: "off": top-k 64 and top-p 0.95, nothing recorded; "top-K 32" and "top-K 128": supports of that many
tokens recorded with their log-probabilities; "filtered": supports of top-p 0.95 on the 1,024 likeliest. All ignore EOS.

A repeat runs all arms of a batch size once, in turn, so a slow spell hits all of them; a rate is the median. Prefill is
counted in. "ms a round" is time over rounds; "host" is what the host's loop takes of a round, waiting for results left
out; "busy" is the share of a profiled run in which the device ran anything; "held" is what the device's memory held.
Then masks on against off: batch 32, 512 tokens, alternating rounds of both; and 98,304 tokens of which every second
request's are recorded: each mask there, in its place, with its token in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import write
from model_loaders import Target, load_draft, load_target
from model_loaders.demo_model import demo_target_folder
from pipeline import SamplingParams, SpeculativePipeline
from pipeline.demo import QUESTIONS
from pipeline.engine.rounds import Ticket

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {"top_k": 64, "top_p": 0.95},
    "top-K 32": {"top_k": 32, "return_sampling_mask": True, "sampling_logprobs": "support"},
    "top-K 128": {"top_k": 128, "return_sampling_mask": True, "sampling_logprobs": "support"},
    "filtered": {"top_k": 1024, "top_p": 0.95, "return_sampling_mask": True, "sampling_logprobs": "support"},
}
BRIEF = ("off", "top-K 32")


class Arm:
    """One pipeline and policy; each run generates once."""

    def __init__(self, pipe: SpeculativePipeline, prompts: Sequence[Any], params: SamplingParams):
        self.pipe, self.prompts, self.params = pipe, prompts, params
        self.rates: list[float] = []
        self.figures: dict[str, float] = {}

    def run(self) -> None:
        """Generate, and note the rate and what a round took."""
        with waiting() as waited:
            torch.cuda.synchronize()
            started = time.perf_counter()
            rollouts = self.pipe.generate(self.prompts, self.params)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        rounds = max(r.num_rounds for r in rollouts)
        tokens = sum(len(r.token_ids) for r in rollouts)
        self.rates.append(tokens / seconds)
        self.figures |= {
            "ms_a_round": 1e3 * seconds / rounds,
            "host_ms_a_round": 1e3 * (seconds - waited.seconds) / rounds,
            "tokens_a_round": statistics.mean(len(r.token_ids) / r.num_rounds for r in rollouts),
            "held_gb": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 1e9,
        }

    def profile(self) -> None:
        """Note the share of a run in which the device ran a kernel or a copy."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.pipe.generate(self.prompts, dataclasses.replace(self.params, max_new_tokens=64))
            torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA
        spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == device)
        # Of the second half: what is captured and loaded at first use is over then.
        middle = spans[0][0] + (spans[-1][1] - spans[0][0]) / 2
        busy, end = 0.0, middle
        for start, stop in spans:
            busy += max(stop - max(start, end), 0)
            end = max(end, stop)
        self.figures["gpu_busy"] = busy / (end - middle)


class waiting:
    """How long the host waited for results."""

    def __enter__(self) -> waiting:
        self.seconds, self._receive = 0.0, Ticket.receive

        def receive(ticket: Ticket) -> Any:
            started = time.perf_counter()
            results = self._receive(ticket)
            self.seconds += time.perf_counter() - started
            return results

        Ticket.receive = receive  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Ticket.receive = self._receive  # type: ignore[method-assign]


def main() -> None:
    """Measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", nargs="*", default=["demo"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the target's forward")
    parser.add_argument("--peers", type=int, default=8, help="transformers' batch size; 0: none")
    parser.add_argument("--peer-tokens", type=int, default=64)
    parser.add_argument("--compiled-peer", action="store_true")
    parser.add_argument("--on-off-rounds", type=int, default=6)
    parser.add_argument("--soak", type=int, default=98304, help="tokens; 0: none")
    parser.add_argument("--brief", action="store_true", help=f"only {' and '.join(BRIEF)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the engine's graphs need one; for the CPU there is benchmarks.decode")

    target = load_target(options.target)
    drafts = {"ordinary": None, **{loaded.method: loaded for loaded in (load_draft(d, target) for d in options.draft)}}
    settings = {name: SETTINGS[name] for name in (BRIEF if options.brief else SETTINGS)}
    figures: dict[str, Any] = {
        "target": options.target, "drafts": options.draft, "dtype": str(target.dtype), "tokens": options.tokens,
        "temperature": options.temperature, "compile": options.compile, "arms": {}, "peers": {},
    }  # fmt: skip
    for batch in options.batches:
        prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(batch)]
        arms = {
            f"{method}, {name}, batch {batch}": Arm(
                SpeculativePipeline(target, draft, max_batch=batch, max_length=1024, compile=options.compile),
                prompts,
                SamplingParams(
                    temperature=options.temperature, seed=0, max_new_tokens=options.tokens, ignore_eos=True, **setting
                ),
            )
            for method, draft in drafts.items()
            for name, setting in settings.items()
        }
        for arm in arms.values():
            for _ in range(2):  # compiles, then captures
                arm.run()
            arm.rates.clear()
        for _ in range(options.repeats):
            for arm in arms.values():
                arm.run()
        for name, arm in arms.items():
            arm.profile()
            figures["arms"][name] = {"tokens_per_second": arm.rates, **arm.figures}
            show(name, arm.rates, arm.figures)
        write("engine", figures)
    if options.peers:
        prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(options.peers)]
        for name, run in peers(options.target, target, prompts, options.peer_tokens, options.compiled_peer).items():
            run()
            rates = [run() for _ in range(options.repeats)]
            figures["peers"][f"{name}, batch {options.peers}"] = rates
            show(f"{name}, batch {options.peers}", rates, {})
    write("engine", figures)
    if options.on_off_rounds:
        figures["masks_on_over_off"] = on_over_off(target, drafts, options.on_off_rounds, options.temperature)
    if options.soak:
        figures["soak"] = soak(target, list(drafts.values())[-1], options.soak)
        print(f"soak: {figures['soak']}")
    print(ratios(figures, options.batches, settings, list(drafts)))
    print(write("engine", figures))


def show(name: str, rates: Sequence[float], figures: dict[str, float]) -> None:
    """One line of the table."""
    parts = [f"{name:36}", f"{statistics.median(rates):9.1f} tokens/s"]
    if figures:
        parts.append(
            f"{figures['tokens_a_round']:5.2f} a round {figures['ms_a_round']:6.2f} ms, host "
            f"{figures['host_ms_a_round']:5.2f} ms, busy {figures['gpu_busy']:5.1%}, held {figures['held_gb']:5.1f} GB"
        )
    print(" ".join(parts), flush=True)


def ratios(figures: dict[str, Any], batches: Sequence[int], settings: Sequence[str], methods: Sequence[str]) -> str:
    """What the figures are held against."""
    rate = {name: statistics.median(arm["tokens_per_second"]) for name, arm in figures["arms"].items()}
    lines = []
    for batch in batches:
        for setting in settings:
            base = rate[f"ordinary, {setting}, batch {batch}"]
            lines += [
                f"{method} over ordinary, {setting}, batch {batch}: "
                f"{rate[f'{method}, {setting}, batch {batch}'] / base:.2f}"
                for method in methods[1:]
            ]
    for name, rates in figures["peers"].items():
        ordinary = rate.get(f"ordinary, off, {name.rsplit(', ', 1)[1]}")
        if ordinary is not None:
            lines.append(f"ordinary, off over {name}: {ordinary / statistics.median(rates):.1f}")
    lines += [f"masks on over off, {name}: {value:.4f}" for name, value in figures.get("masks_on_over_off", {}).items()]
    return "\n".join(lines)


def on_over_off(target: Target, drafts: dict[str, Any], rounds: int, temperature: float) -> dict[str, float]:
    """Tokens a second with masks over without, batch 32, 512 tokens: the medians of alternating rounds."""
    found = {}
    prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(32)]
    off = SamplingParams(temperature=temperature, seed=0, max_new_tokens=512, ignore_eos=True, top_k=64, top_p=0.95)
    on = dataclasses.replace(off, return_sampling_mask=True, sampling_logprobs="support")
    for method, draft in drafts.items():
        pipe = SpeculativePipeline(target, draft, max_batch=32, max_length=1024)
        arms = [Arm(pipe, prompts, off), Arm(pipe, prompts, on)]
        for _ in range(2):
            for arm in arms:
                arm.run()
                arm.rates.clear()
        for i in range(rounds):
            for arm in arms if i % 2 else reversed(arms):
                arm.run()
        found[method] = statistics.median(arms[1].rates) / statistics.median(arms[0].rates)
    return found


def soak(target: Target, draft: Any, tokens: int) -> dict[str, int]:
    """So many tokens, half of them recorded: how many masks there are, and how many are missing or wrong."""
    size = 256
    pipe = SpeculativePipeline(target, draft, max_batch=32, max_length=1024)
    plain = SamplingParams(temperature=1.0, top_k=128, top_p=0.95, max_new_tokens=size, ignore_eos=True)
    recorded = dataclasses.replace(plain, return_sampling_mask=True, sampling_logprobs="support")
    params = [dataclasses.replace(recorded if i % 2 else plain, seed=i) for i in range(tokens // size)]
    prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(len(params))]
    found = {"tokens": 0, "requested": 0, "masks": 0, "misaligned": 0, "outside": 0, "unnormalised": 0}
    for rollout, policy in zip(pipe.generate(prompts, params), params, strict=True):
        found["tokens"] += len(rollout.token_ids)
        if not policy.return_sampling_mask:
            continue
        mask = rollout.sampling_mask
        found["requested"] += size
        found["masks"] += len(mask)
        found["misaligned"] += int(len(mask) != len(rollout.token_ids) or len(mask.logprobs) != len(mask.token_ids))
        for row, token in enumerate(rollout.token_ids):
            ids, logprobs = mask[row], mask.row_logprobs(row)
            at = np.searchsorted(ids, token)
            found["outside"] += int(at == len(ids) or ids[at] != token or logprobs[at] != rollout.logprobs[row])
            found["unnormalised"] += int(abs(np.exp(logprobs.astype(np.float64)).sum() - 1) > 1e-4)
    return found


def peers(
    name: str, target: Target, prompts: Sequence[Any], tokens: int, compiled: bool
) -> dict[str, Callable[[], float]]:
    """transformers' generate over one padded batch, greedy, on a model loaded as its users load it."""
    source = demo_target_folder() if name == "demo" else name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype).to(target.device).eval()
    rows = [target.render_chat(prompt) for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=target.device)

    def rate(**mode: Any) -> Callable[[], float]:
        def run() -> float:
            torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                    pad_token_id=0, **mode,
                )  # fmt: skip
            torch.cuda.synchronize()
            return len(rows) * (out.shape[1] - ids.shape[1]) / (time.perf_counter() - started)

        return run

    found = {"generate": rate(), "generate, static": rate(cache_implementation="static", disable_compile=True)}
    if compiled:
        found["generate, static and compiled"] = rate(cache_implementation="static")
    return found


if __name__ == "__main__":
    main()
