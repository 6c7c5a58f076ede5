"""Arguments that the functions refuse where the logits are device arrays, and how they say so."""

import numpy as np

from gpu import capture_masks, select_support, verify_chain

F, I = np.float32, np.int32
FILTER, VERIFY, CAPTURE = "select_support", "verify_chain", "capture_masks"

# Function, changed arguments (given `up`, which brings an array to the device), message.
CASES = [
    (FILTER, lambda up: {"logits": up(np.zeros(4, F))}, r"logits=\(4,\), expected a CuPy array of shape \[R, V\]"),
    (FILTER, lambda up: {"logits": up(np.zeros((2, 4)))}, r"logits.dtype=float64, expected float32, float16, bfloat16"),
    (FILTER, lambda up: {"logits": up(np.zeros((2, 262145), F))}, r"vocabulary=262145, expected 1..262144"),
    (FILTER, lambda up: {"logits": up(np.zeros((2, 8), F)[:, ::2])}, r"logits.strides=\(32, 8\), .* adjacent tokens"),
    (FILTER, lambda up: {"temperature": np.ones(2, F)}, r"temperature=float32\[2\], expected a contiguous CuPy array"),
    (FILTER, lambda up: {"temperature": up(np.ones(3, F))}, r"temperature=float32\[3\], expected .* float32\[2\]"),
    (FILTER, lambda up: {"temperature": 1.0}, r"temperature=float, expected a contiguous CuPy array float32\[2\]"),
    (FILTER, lambda up: {"top_k": up(np.zeros(2, np.int64))}, r"top_k=int64\[2\], expected .* int32\[2\]"),
    (FILTER, lambda up: {"top_p": up(np.ones(4, F)[::2])}, r"top_p=float32\[2\], expected a contiguous CuPy array"),
    (FILTER, lambda up: {"min_p": np.zeros(2, F)}, r"min_p=float32\[2\], expected a contiguous CuPy array"),
    (FILTER, lambda up: {"capacity": 0}, r"capacity=0, expected at least 1"),
    (FILTER, lambda up: {"filter_order": "top_p_first"}, r"filter_order='top_p_first', expected one of"),
    (FILTER, lambda up: {"capacity": 3, "out": support_of(up)}, r"out=\(2, 4\), expected a Support of an earlier call"),
    (VERIFY, lambda up: {"logits": up(np.zeros((2, 4), F))}, r"logits=\(2, 4\), expected a CuPy .*\[B, W, V\]"),
    (VERIFY, lambda up: {"logits": up(np.zeros((1, 3, 4), F))}, r"support rows=2, expected 3"),
    (VERIFY, lambda up: {"draft_tokens": up(np.zeros((1, 2), I))}, r"draft_tokens=int32\[1, 2\], expected .*\[1, 1\]"),
    (VERIFY, lambda up: {"num_drafts": np.ones(1, I)}, r"num_drafts=int32\[1\], expected a contiguous CuPy array"),
    (VERIFY, lambda up: {"accept_uniforms": up(np.zeros((1, 2), F))}, r"accept_uniforms=float32\[1, 2\], .* float64"),
    (VERIFY, lambda up: {"draw_uniforms": up(np.zeros((1, 1)))}, r"draw_uniforms=float64\[1, 1\], expected .*\[1, 2\]"),
    (VERIFY, lambda up: {"draft_probs": up(np.zeros((1, 2, 4), F))}, r"draft_probs=\(1, 2, 4\), .* shape \(1, 1, 4\)"),
    (VERIFY, lambda up: {"draft_probs": np.zeros((1, 1, 4), F)}, r"draft_probs=\(1, 1, 4\), expected a CuPy array"),
    (VERIFY, lambda up: {"threshold_acc": 0.0}, r"threshold_acc=0.0, expected a number above 0"),
    (CAPTURE, lambda up: {"wanted": np.ones(1, bool)}, r"wanted=bool\[1\], expected a contiguous CuPy array"),
    (CAPTURE, lambda up: {"wanted": up(np.ones(1, np.uint8))}, r"wanted=uint8\[1\], expected .* bool\[1\]"),
    (CAPTURE, lambda up: {"logits": up(np.zeros((2, 1, 4), F))}, r"logits=\(2, 1, 4\), expected \(1, 2, V\)"),
    (CAPTURE, lambda up: {"max_support": 0}, r"max_support=0, expected at least 1"),
]  # fmt: skip


def filter_arguments(up):
    return {
        "logits": up(np.zeros((2, 4), F)),
        "temperature": up(np.ones(2, F)),
        "top_k": up(np.zeros(2, I)),
        "top_p": up(np.ones(2, F)),
        "capacity": 4,
    }


def support_of(up):
    return select_support(**filter_arguments(up))


def verify_arguments(up):
    return {
        "logits": up(np.zeros((1, 2, 4), F)),
        "support": support_of(up),
        "draft_tokens": up(np.zeros((1, 1), I)),
        "num_drafts": up(np.ones(1, I)),
        "accept_uniforms": up(np.zeros((1, 2))),
        "draw_uniforms": up(np.zeros((1, 2))),
    }


def capture_arguments(up):
    verify = verify_arguments(up)
    return {
        "logits": verify["logits"],
        "support": verify["support"],
        "verdict": verify_chain(**verify),
        "wanted": up(np.ones(1, bool)),
        "max_support": 4,
    }


def call(function, change, up):
    """Call a function with good arguments but for these."""
    arguments, run = {
        FILTER: (filter_arguments, select_support),
        VERIFY: (verify_arguments, verify_chain),
        CAPTURE: (capture_arguments, capture_masks),
    }[function]
    return run(**{**arguments(up), **change(up)})
