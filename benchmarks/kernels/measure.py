"""One case after another: the library, the peers, and their distance from the reference."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels import in_flashinfer, in_torch
from benchmarks.kernels.accuracy import Reference, of_ours, of_peer
from benchmarks.kernels.cases import Inputs, Setting, Shape, against_peers, make_inputs
from benchmarks.kernels.ours import Rounds
from benchmarks.kernels.timing import Call, Timer

FLASHINFER = tuple(f"flashinfer {order}" for order in in_flashinfer.ORDERS)


class Bench:
    """Times cases on the current GPU."""

    def __init__(self, replays: int, peers: bool):
        self.timer = Timer(replays)
        self.peers, self.flashinfer, self.without = peers, None, ""
        if peers:
            try:
                self.flashinfer = in_flashinfer.load()
            except (ImportError, OSError, RuntimeError) as error:
                self.without = _brief(error)
                print(f"FlashInfer isn't measured: {self.without}", flush=True)

    def machine_figures(self) -> dict[str, Any]:
        """What the floor is made of."""
        with self.timer.active():
            self.copy_rate = self.timer.copy_rate()
            empty = self.timer.graph([])
        figures = {"copy_bytes_a_second": round(self.copy_rate), "empty_graph_us": round(empty, 2)}
        if self.flashinfer is not None:
            return figures | {"flashinfer": importlib.metadata.version("flashinfer-python")}
        return figures | {"flashinfer": f"not measured: {self.without or 'not asked for'}"}

    def make_sets(self, shape: Shape) -> list[Inputs]:
        """Inputs enough that the cache holds none of them by the time it comes round again."""
        with self.timer.active():
            sets = [make_inputs(shape, seed) for seed in range(shape.num_sets)]
        torch.cuda.synchronize()
        return sets

    def case(self, shape: Shape, setting: Setting, sets: list[Inputs]) -> dict[str, Any]:
        """The figures of one shape and setting; an arm that fails gives {"error": why}."""
        case: dict[str, Any] = {
            "batch": shape.batch,
            "vocabulary": shape.vocabulary,
            "dtype": shape.dtype,
            "logits": "peaked" if shape.peaked else "normal",
            "top_k": setting.top_k,
            "top_p": setting.top_p,
            "sets": len(sets),
            "logits_bytes": shape.logits_bytes,
            "floor_us": round(shape.logits_bytes / self.copy_rate * 1e6, 2),
        }
        with self.timer.active():
            reference = Reference(sets[0], setting)
            case["specmask"] = _attempt(lambda: self._ours(shape, setting, sets, reference))
            if self.peers and against_peers(shape):
                arm = lambda one: in_torch.TorchRound(shape, setting, one)  # noqa: E731
                case["torch"] = _attempt(lambda: self._peer(in_torch.STAGES, arm, sets, reference))
            if self.flashinfer is not None and against_peers(shape) and setting.top_k:
                for name, order in zip(FLASHINFER, in_flashinfer.ORDERS, strict=True):
                    case[name] = _attempt(lambda order=order: self._flashinfer(shape, setting, sets, reference, order))
        return case

    def _ours(self, shape: Shape, setting: Setting, sets: list[Inputs], reference: Reference) -> dict[str, Any]:
        rounds = Rounds(shape, setting, sets)
        stages = {stage: rounds.calls(stage) for stage in rounds.stages}
        return self._times(stages) | rounds.facts() | {"distance": of_ours(reference, rounds)}

    def _flashinfer(
        self, shape: Shape, setting: Setting, sets: list[Inputs], reference: Reference, order: str
    ) -> dict[str, Any]:
        def arm(one: Inputs) -> in_flashinfer.FlashInferRound:
            return in_flashinfer.FlashInferRound(self.flashinfer, shape, setting, one, order)

        return self._peer(in_flashinfer.STAGES, arm, sets, reference)

    def _peer(
        self, stages: tuple[str, ...], arm: Callable[[Inputs], Any], sets: list[Inputs], reference: Reference
    ) -> dict[str, Any]:
        rounds = [arm(one) for one in sets]
        calls = {stage: [lambda one=one, stage=stage: one.run(stage) for one in rounds] for stage in stages}
        return self._times(calls) | {"distance": of_peer(reference, rounds[0])}

    def _times(self, stages: dict[str, list[Call]]) -> dict[str, Any]:
        every = next(reversed(stages.values()))
        return {
            "graph_us": {stage: round(self.timer.graph(calls), 2) for stage, calls in stages.items()},
            "alone_us": round(self.timer.graph(every[:1]), 2),
            "eager_us": round(self.timer.eager(every), 2),
        }


def _attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    # One arm that fails, for want of memory say, must not cost the figures of the others.
    try:
        return measure()
    except Exception as error:
        return {"error": _brief(error)}
    finally:
        gc.collect()


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
