"""One part after another, as long as there is time; what fails is noted, and the rest goes on."""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.arms import ENGINES, Arm, HeldMemory
from benchmarks.engine.comparisons import on_over_off, ratios, soak, unbounded_over_bounded
from benchmarks.engine.peers import COMPILED, EAGER, STATIC, Peer
from benchmarks.engine.plan import BRIEF, ORDINARY, Case, asked_for, cases
from benchmarks.report import write
from model_loaders import load_draft, load_target
from pipeline import SpeculativePipeline

PROFILING_SECONDS = 15
"""What is kept of the time for the profiler, which comes last because it slows what follows."""
COMPILING_SECONDS = 60
"""Time that must be left for transformers to compile."""


class Measurement:
    """All of them, with a deadline."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.figures: dict[str, Any] = {
            "target": options.target, "drafts": {}, "tokens": options.tokens, "peer_tokens": options.peer_tokens,
            "temperatures": options.temperatures, "proposal": options.proposal, "compile": options.compile,
            "prompts": [path.stem for path in options.prompts] or "the demo's questions, EOS ignored",
            "arms": {}, "peak_gb": {}, "peers": {}, "masks_on_over_off": {},
            "unbounded_over_bounded": {}, "soak": {}, "ratios": {},
            "errors": {}, "not_run": [], "seconds": {},
        }  # fmt: skip
        self.drafts: dict[str, Any] = {ORDINARY: None}
        self.arms: dict[str, Arm] = {}
        self._pipes: dict[tuple[str, int], SpeculativePipeline] = {}

    def run(self) -> Path:
        """Measure; where the results are."""
        options = self.options
        if not self._part("loading the target", self._load_target):
            return self._write()
        for draft in options.draft:
            name, _, folder = draft.rpartition("=")
            # By name, not place: a path says nothing elsewhere.
            self._part(f"loading {name or Path(folder).name}", lambda n=name, f=folder: self._load_draft(n, f))
        planned = cases(options.batches, options.temperatures, options.settings)
        asked = [case for case in planned if case.batch == options.batches[0]]
        for case in asked:
            self._part(f"{case.arm('arms')}", lambda case=case: self._case(case), PROFILING_SECONDS)
        if options.peer_batch:
            for method in self.drafts:
                self._part(f"{method}, as transformers", lambda method=method: self._beside_peers(method))
            for mode in (EAGER, STATIC):
                self._part(mode, lambda mode=mode: self._peer(mode), PROFILING_SECONDS)
        for method in self.drafts if options.on_off_rounds else ():
            self._part(f"masks on and off, {method}", lambda method=method: self._on_off(method), PROFILING_SECONDS)
        for method in self.drafts if options.unbounded_rounds else ():
            name = f"masks of top_p alone, {method}"
            self._part(name, lambda method=method: self._unbounded(method), PROFILING_SECONDS)
        if options.soak:
            self._part("soak", self._soak, PROFILING_SECONDS)
        if options.peer_batch and options.compiled_peer:
            self._part(COMPILED, lambda: self._peer(COMPILED), PROFILING_SECONDS + COMPILING_SECONDS)
        for case in planned[len(asked) :]:
            self._part(f"{case.arm('arms')}", lambda case=case: self._case(case), PROFILING_SECONDS)
        if self.target.device.type == "cuda":
            for case in planned:
                if case.temperature == options.temperatures[0] and case.setting in BRIEF:
                    self._part(f"{case.arm('profile')}", lambda case=case: self._profile(case))
        for name, value in self.figures["ratios"].items():
            print(f"{name}: {value:.4f}" if name.startswith("masks") else f"{name}: {value:.2f}")
        print(f"soak: {self.figures['soak']}")
        print(f"not run: {self.figures['not_run'] or 'nothing'}; failed: {list(self.figures['errors']) or 'nothing'}")
        return self._write()

    def _part(self, name: str, function: Callable[[], None], kept: float = 0) -> bool:
        """Run it, if more than `kept` seconds are left; whether it came to its end."""
        if time.monotonic() > self.deadline - kept:
            self.figures["not_run"].append(name)
            return False
        started = time.monotonic()
        try:
            function()
        except Exception as error:
            traceback.print_exc()
            self.figures["errors"][name] = f"{type(error).__name__}: {error}"[:1000]
        self.figures["seconds"][name] = round(time.monotonic() - started, 1)
        self.figures["ratios"] = ratios(self.figures)
        self._write()
        return name not in self.figures["errors"]

    def _write(self) -> Path:
        return write("engine", self.figures, self.options.results)

    def _load_target(self) -> None:
        held = HeldMemory()
        self.target = load_target(self.options.target, device=self.options.device)
        self.figures |= {"dtype": str(self.target.dtype), "weights_gb": held.peak() / 1e9}

    def _load_draft(self, name: str, folder: str) -> None:
        draft = load_draft(folder, self.target)
        self.drafts[name or draft.method] = draft
        self.figures["drafts"][name or draft.method] = draft.sha256

    def _options(self, batch: int, draft: Any) -> dict[str, Any]:
        proposal = {} if draft is None else {"proposal": self.options.proposal}
        device = self.target.device.type
        compiled = self.options.compile
        return {"max_batch": batch, "max_length": 1024, "engine": ENGINES[device], "compile": compiled, **proposal}

    def _pipe(self, method: str, case: Case) -> SpeculativePipeline:
        """The pipeline of a method and batch size, warm for masks and without."""
        key = method, case.batch
        if key not in self._pipes:
            held, draft = HeldMemory(), self.drafts[method]
            pipe = SpeculativePipeline(self.target, draft, **self._options(case.batch, draft))
            for setting in BRIEF:
                self._arm(pipe, Case(case.batch, case.temperature, setting)).warm_up()
            self.figures["peak_gb"][f"{method}, batch {case.batch}"] = held.peak() / 1e9
            self._pipes[key] = pipe
        return self._pipes[key]

    def _arm(self, pipe: SpeculativePipeline, case: Case) -> Arm:
        files = self.options.prompts
        return Arm(pipe, asked_for(self.target, case.batch, files), case.params(self.options.tokens, not files))

    def _case(self, case: Case) -> None:
        """A setting's arms, in turn."""
        arms, failed = {}, {}
        for method in self.drafts:
            try:
                arms[method] = self._arm(self._pipe(method, case), case)
                arms[method].warm_up()
            except Exception as error:  # the other methods go on
                failed[method] = error
                arms.pop(method, None)
        for _ in range(self.options.repeats):
            for arm in arms.values():
                arm.run()
        for method, arm in arms.items():
            if self.target.device.type == "cuda":
                arm.time_rounds()
            self._note(case.arm(method), arm)
        for method, error in failed.items():
            traceback.print_exception(error)
            self.figures["errors"][case.arm(method)] = f"{type(error).__name__}: {error}"[:1000]

    def _note(self, name: str, arm: Arm) -> None:
        self.arms[name] = arm
        self.figures["arms"][name] = arm.figures()
        print(line(name, arm), flush=True)

    def _profile(self, case: Case) -> None:
        for method in self.drafts:
            name = case.arm(method)
            if name in self.arms:
                self.arms[name].profile()
                self._note(name, self.arms[name])

    def _asked_of_peers(self) -> list[Any]:
        options = self.options
        return asked_for(self.target, options.peer_batch, options.prompts)[: options.peer_batch]

    def _beside_peers(self, method: str) -> None:
        """What the peers are asked: the same prompts, greedy, each so many tokens whatever ends it."""
        options = self.options
        case = Case(options.peer_batch, 0.0, "off")
        arm = Arm(self._pipe(method, case), self._asked_of_peers(), case.params(options.peer_tokens, True))
        arm.warm_up()
        for _ in range(options.repeats):
            arm.run()
        rates = [run["tokens_per_second"] for run in arm.runs]
        self.figures["peers"][f"{method}, batch {options.peer_batch}"] = rates
        print(f"{method}, batch {options.peer_batch}, as transformers: {arm.rate:.1f} tokens/s", flush=True)

    def _peer(self, mode: str) -> None:
        options = self.options
        run = Peer(options.target, self.target, self._asked_of_peers(), options.peer_tokens).rate_in(mode)
        for _ in range(2 if mode == COMPILED else 1):
            run()
        rates = [run() for _ in range(2)]
        self.figures["peers"][f"{mode}, batch {options.peer_batch}"] = rates
        print(f"{mode}, batch {options.peer_batch}: {statistics.median(rates):.1f} tokens/s", flush=True)

    def _compared(self, comparison: Callable[..., dict[str, Any]], method: str, rounds: int) -> dict[str, Any]:
        draft, sizes = self.drafts[method], {"batch": self.options.on_off_batch, "tokens": self.options.on_off_tokens}
        others = {k: v for k, v in self._options(sizes["batch"], draft).items() if k != "max_batch"}
        return comparison(self.target, draft, rounds, **sizes, **others)

    def _on_off(self, method: str) -> None:
        found = self._compared(on_over_off, method, self.options.on_off_rounds)
        self.figures["masks_on_over_off"][method] = found
        print(f"masks on over off, {method}: {found['ratio']:.4f}, by rounds {found['ratio_of_rounds']:.4f}")

    def _unbounded(self, method: str) -> None:
        found = self._compared(unbounded_over_bounded, method, self.options.unbounded_rounds)
        self.figures["unbounded_over_bounded"][method] = found
        by_rounds = found["ratio_of_rounds"]
        print(f"masks of top_p alone over bounded ones, {method}: {found['ratio']:.4f}, by rounds {by_rounds:.4f}")

    def _soak(self) -> None:
        method, draft = list(self.drafts.items())[-1]
        options = {k: v for k, v in self._options(32, draft).items() if k != "compile"}
        found = soak(self.target, draft, self.options.soak, lambda: time.monotonic() < self.deadline, **options)
        self.figures["soak"] = {"method": method, **found}
        print(f"soak, {method}: {found}", flush=True)


def line(name: str, arm: Arm) -> str:
    """One arm for the eye."""
    figures = arm.figures()
    parts = [f"{name:40}"]
    if arm.runs:
        parts.append(
            f"{arm.rate:9.1f} tokens/s, {figures['tokens_a_round']:5.2f} a round of {figures['ms_a_round']:6.2f} ms, "
            f"host {figures['host_ms_a_round']:5.2f} ms"
        )
    parts += [f"{share} {figures[share]:5.1%}" for share in ("in_rounds", "kernels_in_rounds") if share in figures]
    return " ".join(parts)
