"""The command of benchmarks/kernels: measures, prints line by line, writes what it has after every shape."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels
from benchmarks.kernels.cases import QUICK_SETTINGS, QUICK_SHAPES, SETTINGS, SHAPES, Inputs, Setting, Shape
from benchmarks.kernels.measure import FLASHINFER, Bench
from benchmarks.kernels.table import tables
from benchmarks.report import RESULTS, insert_into, write


def main() -> None:
    """Measure, or print the tables of what was measured."""
    parser = argparse.ArgumentParser(description=kernels.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, three settings; nothing is written")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this long")
    parser.add_argument("--no-peers", action="store_true", help="only the library")
    parser.add_argument("--table", action="store_true", help="print the tables of the results instead")
    parser.add_argument("--into", type=Path, metavar="FILE", help="with --table: put them between FILE's markers")
    parser.add_argument("--results", type=Path, default=RESULTS / "kernels.json", help="with --table: what to read")
    options = parser.parse_args()
    if options.table:
        report = json.loads(options.results.read_text())
        insert_into(options.into, "kernels", tables(report)) if options.into else print(tables(report))
    elif not torch.cuda.is_available():
        parser.exit(2, "device=none, expected a CUDA device: this measures kernels on a GPU (--table needs none)\n")
    else:
        sys.exit(measure(options.quick, options.seconds, not options.no_peers))


def measure(quick: bool, seconds: float, with_peers: bool) -> int:
    """Run every case in time; how many went wrong."""
    deadline = time.monotonic() + seconds
    bench = Bench(replays=5 if quick else 15, peers=with_peers)
    figures: dict[str, Any] = {
        "work": " ".join(kernels.__doc__.split("\n\n")[2].split()),
        "sampling": "temperature 1, target-only verification",
        **bench.machine_figures(),
        "cases": [],
        "not_run": [],
    }
    say(f"{figures['copy_bytes_a_second'] / 1e12:.2f} TB/s copied, an empty graph {figures['empty_graph_us']} us")
    failed = 0
    for shape in QUICK_SHAPES if quick else SHAPES:
        sets: list[Inputs] = []
        for setting in QUICK_SETTINGS if quick else SETTINGS:
            if time.monotonic() > deadline:
                figures["not_run"].append(f"{shape.name}, {setting.name}")
                continue
            sets = sets or bench.make_sets(shape)
            case = bench.case(shape, setting, sets)
            failed += sum("error" in part for part in case.values() if isinstance(part, dict))
            figures["cases"].append(case)
            say(line(shape, setting, case))
        del sets
        torch.cuda.empty_cache()
        if not quick:
            write("kernels", figures)
    say(f"not run: {figures['not_run'] or 'nothing'}; failed: {failed}")
    return 1 if failed else 0


def line(shape: Shape, setting: Setting, case: dict[str, Any]) -> str:
    """One case for the eye."""
    parts = [f"{shape.name} {setting.name}: floor {case['floor_us']}"]
    for name in ("specmask", "torch", *FLASHINFER):
        measured = case.get(name)
        if measured is None:
            continue
        if "error" in measured:
            parts.append(f"{name} FAILED {measured['error']}")
            continue
        stages = " ".join(f"{stage} {time}" for stage, time in measured["graph_us"].items())
        distance = measured["distance"]
        off = f"off by {distance['support_difference']} tokens, L1 {distance.get('l1', '-')}"
        parts.append(f"{name} {stages} alone {measured['alone_us']} eager {measured['eager_us']} ({off})")
    return " | ".join(parts)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
