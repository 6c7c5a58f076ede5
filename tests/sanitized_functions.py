"""Every function with kernels beside the rounds, small, for `tests.sanitize`; and which kernels nothing has run."""

import importlib
import pkgutil
from functools import lru_cache

import gpu
from gpu.device.launch import Kernel
from tests import (
    device_adjust,
    device_estimate,
    device_layers,
    device_lookup,
    device_progress,
    device_random,
    device_replay,
    device_restrict,
    device_round_buffer,
    device_top,
)
from tests.strategies import DTYPES

_CACHED = type(lru_cache(lambda: None))


def run_functions(backend):
    """Each against its host twin: the cases of `tests/device_*.py`."""
    up, down = backend.up, backend.down
    for cases in (device_adjust, device_lookup, device_restrict, device_top):
        for name in cases.CASES:
            cases.check_case(up, down, name)
    for name in device_adjust.SLOT_CASES:
        device_adjust.check_slot_case(up, down, name)
    device_adjust.check_count(up, down)
    device_adjust.check_what_is_out_of_range(up, down)
    device_lookup.check_lengths_out_of_range(up, down)
    device_restrict.check_what_is_out_of_range(up, down)
    device_top.check_kinds_of_rows(up, down)
    device_progress.check_advance(up, down)
    device_progress.check_append(up, down)
    device_random.check_uniforms(up, down)
    device_random.check_known_answers(up, down)
    for dtype in DTYPES:
        device_layers.check_swiglu(up, down, dtype)
        device_layers.check_turn(up, down, dtype)
    for name in device_replay.CASES:
        device_replay.check_case(backend, name)
    device_replay.check_out_of_range(backend)
    device_estimate.check_landscapes(up, down, "bfloat16", 700, seed=0)
    device_round_buffer.check_rounds(backend, relayed=True)


def kernel_factories():
    """What makes kernels in gpu/, by name."""
    # The launcher has none, and can't be imported without CuPy.
    names = {module.name for module in pkgutil.walk_packages(gpu.__path__, "gpu.")} - {"gpu.device.launcher"}
    found = {}
    for module in map(importlib.import_module, sorted(names)):
        for name, function in vars(module).items():
            if function.__class__ is _CACHED and function.__annotations__.get("return") is Kernel:
                found[f"{function.__module__}.{name}"] = function
    return found


def never_run():
    """The names of those that have made none."""
    return sorted(name for name, factory in kernel_factories().items() if not factory.cache_info().currsize)
