"""Where a measurement's figures go, with what is needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write `figures` with machine, versions and commit to results/<name>.json."""
    from pipeline.provenance import package_versions

    path = RESULTS / f"{name}.json"
    report = {"name": name, "date": time.strftime("%Y-%m-%d"), "commit": _commit(), "machine": machine()}
    path.write_text(json.dumps(report | {"versions": package_versions(), "figures": figures}, indent=1) + "\n")
    return path


def machine() -> dict[str, Any]:
    """The processor, its cores, and the card where there is one."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=RESULTS, check=False
    )
    return described.stdout.strip() or "unknown"
