"""The kernels under NVIDIA's compute-sanitizer: `python -m tests.sanitize`, on a machine with a CUDA device.

Each tool runs every kernel in a process of its own, in small rounds and by what else has kernels: memcheck (accesses
out of bounds or misaligned), racecheck (hazards in shared memory), initcheck (reads of memory that nothing wrote).
CuPy's memory pool is off there, so that every array has bounds of its own.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck")
CLEAN = re.compile(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed)")
# batch, width, vocabulary, dtype, of the proposals, order, capacity. More candidates than fit, and than are listed.
ROUNDS = (
    (3, 8, 1100, "bfloat16", "float32", "top_k_first", 40),
    (4, 3, 5003, "float32", "bfloat16", "joint", 5003),
    (2, 2, 33, "float16", "float16", "top_k_first", 33),
    (2, 2, 70001, "bfloat16", "float32", "joint", 9),
)


def find_sanitizer():
    """The path of compute-sanitizer: on PATH, in the CUDA toolkit, or in NVIDIA's Python package; else SystemExit."""
    places = [shutil.which("compute-sanitizer")]
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    for root in filter(None, roots):
        places += [f"{root}/bin/compute-sanitizer", f"{root}/compute-sanitizer/compute-sanitizer"]
    for folder in sys.path:
        places += map(str, Path(folder).glob("nvidia/**/compute-sanitizer") if folder else ())
    for place in places:
        if place and os.access(place, os.X_OK) and Path(place).is_file():
            return place
    raise SystemExit(
        "compute-sanitizer=missing, expected it on PATH or under /usr/local/cuda: install the CUDA toolkit's "
        "compute-sanitizer (package cuda-sanitizer, or pip install nvidia-cuda-sanitizer-api)"
    )


def check(tool, sanitizer):
    """Whether the tool finds nothing; prints what it does find."""
    command = [
        *(sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"),
        *(("--report-api-errors", "no") if tool == "memcheck" else ()),  # loaders look for what older drivers lack
    ]
    start = time.monotonic()
    run = subprocess.run(
        [*command, sys.executable, "-m", "tests.sanitize", "--run"], capture_output=True, text=True, check=False
    )
    clean = run.returncode == 0 and CLEAN.search(run.stdout + run.stderr) is not None
    print(f"{tool}: {'clean' if clean else f'failed ({run.returncode})'}, {time.monotonic() - start:.0f} s", flush=True)
    if not clean:
        print(run.stdout, run.stderr, sep="\n")
    return clean


def run_kernels():
    """All kernels, each function held against its host twin; SystemExit where one of them didn't run."""
    import cupy
    import numpy as np

    from tests.backends import Device
    from tests.sanitized_functions import never_run, run_functions
    from tests.sanitized_rounds import Sizes, run_kinds

    class Sanitized(Device):
        """Copies what kernels wrote, and nothing else: initcheck watches copies too."""

        def entries(self, array, counts):
            entries = np.zeros(array.shape, array.dtype)
            for row in np.flatnonzero(counts):
                entries[row, : counts[row]] = self.down(array[row, : counts[row]])
            return entries

    cupy.cuda.set_allocator(None)
    for seed, sizes in enumerate(ROUNDS):
        run_kinds(Sanitized(), seed, Sizes(*sizes))
    run_functions(Sanitized())
    if names := never_run():
        raise SystemExit(f"kernels={names}, expected that each runs: give tests/sanitized_functions.py a call of it")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("tools", nargs="*", help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--run", action="store_true", help="run the kernels, without a tool")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write what was found to sanitize.json there")
    options = parser.parse_args()
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"tools={sorted(unknown)}, expected some of {TOOLS}")
    if options.run:
        run_kernels()
    else:
        path = find_sanitizer()
        results = {tool: check(tool, path) for tool in options.tools or TOOLS}
        if options.results:
            from benchmarks.report import write

            write("sanitize", {"clean": results, "kernels": "all of gpu/, by tests/sanitize.py"}, options.results)
        sys.exit(not all(results.values()))
