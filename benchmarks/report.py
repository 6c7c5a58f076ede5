"""Where a measurement's figures go, with what is needed to repeat it, and where their tables go."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MEASURED_BESIDE = ("flashinfer-python", "apache-tvm-ffi")
"""Packages that only benchmarks use."""


def write(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `figures` with machine, versions and commit to <folder>/<name>.json."""
    path = folder / f"{name}.json"
    report = {"name": name, "date": time.strftime("%Y-%m-%d"), "commit": _commit(), "machine": machine()}
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(report | {"versions": _versions(), "figures": figures}, indent=1) + "\n")
    temporary.replace(path)
    return path


def insert(text: str, name: str, table: str) -> str:
    """`text` with `table` between the markers of that name. ValueError if it has none."""
    start, stop = markers(name)
    before, begin, rest = text.partition(start)
    _, end, after = rest.partition(stop)
    if not (begin and end):
        raise ValueError(f"markers={start} ... {stop}, expected both in the file, in this order")
    return f"{before}{begin}\n{table}\n{end}{after}"


def insert_into(path: Path, name: str, table: str) -> None:
    """The same in a file, replaced at once."""
    changed = insert(path.read_text(), name, table)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(changed)
    temporary.replace(path)


def markers(name: str) -> tuple[str, str]:
    """What stands before and behind a table in a Markdown file."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def machine() -> dict[str, Any]:
    """The processor, its cores, and the card and its driver where there is one."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        if on_gpu
        else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _versions() -> dict[str, str]:
    from pipeline.running.provenance import package_versions

    return package_versions(*MEASURED_BESIDE)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    # A copy of the tree without its history says which commit it is in SPECMASK_COMMIT.
    return os.environ.get("SPECMASK_COMMIT") or _output("git", "describe", "--always", "--dirty") or "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=RESULTS, check=False).stdout.strip()
    except OSError:
        return ""
