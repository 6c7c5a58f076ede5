"""The command of benchmarks/engine."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import engine
from benchmarks.engine.measure import Measurement
from benchmarks.engine.plan import SETTINGS
from benchmarks.engine.table import tables
from benchmarks.report import RESULTS, insert_into
from model_loaders.drafts.finding import DEMO_DRAFTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the lines, write the figures; how many parts failed."""
    parser = argparse.ArgumentParser(description=engine.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument(
        "--draft", nargs="*", default=list(DEMO_DRAFTS), metavar="[NAME=]DRAFT", help="as load_draft takes them"
    )
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], metavar="FILE", help="data sets to decode")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 1])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--proposal", choices=("auto", "argmax", "sample"), default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile the target's forward: minutes a shape")
    parser.add_argument("--peer-batch", type=int, default=8, help="transformers' batch size; 0: no peers")
    parser.add_argument("--peer-tokens", type=int, default=256)
    parser.add_argument("--compiled-peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--on-off-rounds", type=int, default=6, help="0: none")
    parser.add_argument("--unbounded-rounds", type=int, default=6, help="masks of top_p alone; 0: none")
    parser.add_argument("--on-off-batch", type=int, default=32)
    parser.add_argument("--on-off-tokens", type=int, default=512)
    parser.add_argument("--soak", type=int, default=98304, help="tokens; 0: none")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this long")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--device", default="cuda", help="cpu: without graphs, to try it out")
    parser.add_argument("--table", action="store_true", help="print the tables of the results instead")
    parser.add_argument("--into", type=Path, metavar="FILE", help="with --table: put them between FILE's markers")
    options = parser.parse_args(arguments)
    if options.table:
        found = tables(json.loads((options.results / "engine.json").read_text()))
        insert_into(options.into, "engine", found) if options.into else print(found)
        return 0
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("no CUDA device: the engine's graphs need one; for the CPU there is benchmarks.decode")
    # CUPTI that is taken down and set up again between graphs has crashed; it stays.
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    measurement = Measurement(options)
    print(measurement.run())
    return len(measurement.figures["errors"])


if __name__ == "__main__":
    raise SystemExit(main())
