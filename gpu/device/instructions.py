"""The instructions that kernels name: PTX, or plain Python in the simulator (NUMBA_ENABLE_CUDASIM=1)."""

from numba import config

SIMULATED = bool(config.ENABLE_CUDASIM)
if SIMULATED:
    from gpu.device.simulated import (
        add_at,
        divide_approximately,
        exp2_approximate,
        fetch_early,
        float_to_half,
        half_to_float,
        load_four,
        load_kept,
        make_known,
        max_bfloat16x2,
        max_float16x2,
        max_float32,
        take_ticket,
        warp_max_u32,
        warp_min_u32,
        warp_sum_s32,
        what_is_known,
    )
else:
    from gpu.device.ptx import (
        add_at,
        divide_approximately,
        exp2_approximate,
        fetch_early,
        float_to_half,
        half_to_float,
        load_four,
        load_kept,
        make_known,
        max_bfloat16x2,
        max_float16x2,
        max_float32,
        take_ticket,
        warp_max_u32,
        warp_min_u32,
        warp_sum_s32,
        what_is_known,
    )

__all__ = [
    "SIMULATED",
    "add_at",
    "divide_approximately",
    "exp2_approximate",
    "fetch_early",
    "float_to_half",
    "half_to_float",
    "load_four",
    "load_kept",
    "make_known",
    "max_bfloat16x2",
    "max_float16x2",
    "max_float32",
    "take_ticket",
    "warp_max_u32",
    "warp_min_u32",
    "warp_sum_s32",
    "what_is_known",
]
