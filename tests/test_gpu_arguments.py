"""Bad arguments are refused at the door, by name; importing gpu needs no torch."""

import subprocess
import sys

import numpy as np
import pytest

from gpu import capture_masks, philox_4x32, sample_seeds, select_support, top_logprobs, uniforms, verify_chain

F, I = np.float32, np.int32


def filter_arguments(**change):
    arguments = {
        "logits": np.zeros((2, 4), F),
        "temperature": np.ones(2, F),
        "top_k": np.zeros(2, I),
        "top_p": np.ones(2, F),
        "capacity": 4,
    }
    return {**arguments, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros(4, F)}, r"logits=\(4,\), expected a NumPy array of shape \[R, V\]"),
        ({"logits": [[0.0]]}, r"logits=list, expected a NumPy array"),
        ({"logits": np.zeros((2, 4))}, r"logits.dtype=float64, expected float32, float16, bfloat16"),
        ({"logits": np.zeros((2, (1 << 18) + 1), F)}, r"vocabulary=262145, expected 1..262144"),
        ({"logits": np.zeros((2, 0), F)}, r"vocabulary=0, expected 1..262144"),
        ({"logits": np.zeros((2, 8), F)[:, ::2]}, r"logits.strides=\(32, 8\), expected adjacent tokens"),
        ({"logits": np.zeros((2, 8), F)[::-1]}, r"logits.strides=\(-32, 4\), expected adjacent tokens"),
        ({"temperature": np.ones(3, F)}, r"temperature=float32\[3\], expected a NumPy array float32\[2\]"),
        (
            {"temperature": np.array([1, -0.5], F)},
            r"temperature\[1\]=-0.5, expected a finite number of at least 0",
        ),
        ({"temperature": np.array([1, np.nan], F)}, r"temperature\[1\]=nan, expected"),
        ({"temperature": np.array([1, np.inf], F)}, r"temperature\[1\]=inf, expected"),
        ({"top_k": np.array([0, -1], I)}, r"top_k\[1\]=-1, expected at least 0"),
        ({"top_k": np.array([0, 1])}, r"top_k=int64\[2\], expected a NumPy array int32\[2\]"),
        ({"top_p": np.array([0, 1], F)}, r"top_p\[0\]=0.0, expected a number in \(0, 1\]"),
        ({"top_p": np.array([1, 1.5], F)}, r"top_p\[1\]=1.5, expected"),
        ({"top_p": np.array([1, np.nan], F)}, r"top_p\[1\]=nan, expected"),
        ({"min_p": np.array([0, 1], F)}, r"min_p\[1\]=1.0, expected a number in \[0, 1\)"),
        ({"filter_order": "top_p_first"}, r"filter_order='top_p_first', expected one of"),
        ({"capacity": 0}, r"capacity=0, expected at least 1"),
    ],
)
def test_select_support(change, message):
    with pytest.raises(ValueError, match=message):
        select_support(**filter_arguments(**change))


def verify_arguments(**change):
    arguments = {
        "logits": np.zeros((1, 2, 4), F),
        "support": select_support(**filter_arguments()),
        "draft_tokens": np.zeros((1, 1), I),
        "num_drafts": np.ones(1, I),
        "accept_uniforms": np.zeros((1, 2)),
        "draw_uniforms": np.zeros((1, 2)),
    }
    return {**arguments, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((2, 4), F)}, r"logits=\(2, 4\), expected a NumPy array of shape \[B, W, V\]"),
        ({"logits": np.zeros((1, 3, 4), F)}, r"support rows=2, expected 3"),
        (
            {"draft_tokens": np.zeros((1, 2), I)},
            r"draft_tokens=int32\[1, 2\], expected a NumPy array int32\[1, 1\]",
        ),
        ({"num_drafts": np.full(1, 2, I)}, r"num_drafts\[0\]=2, expected 0..1"),
        ({"num_drafts": np.full(1, -1, I)}, r"num_drafts\[0\]=-1, expected 0..1"),
        ({"accept_uniforms": np.zeros((1, 1))}, r"accept_uniforms=float64\[1, 1\], expected"),
        (
            {"draw_uniforms": np.array([[0, 1.0]])},
            r"draw_uniforms\[0, 1\]=1.0, expected a uniform in \[0, 1\)",
        ),
        ({"draw_uniforms": np.array([[np.nan, 0]])}, r"draw_uniforms\[0, 0\]=nan, expected"),
        ({"draft_probs": np.zeros((1, 2, 4), F)}, r"draft_probs=\(1, 2, 4\), expected shape \(1, 1, 4\)"),
    ],
)
def test_verify_chain(change, message):
    with pytest.raises(ValueError, match=message):
        verify_chain(**verify_arguments(**change))


def test_capture_masks():
    arguments = verify_arguments()
    verdict = verify_chain(**arguments)
    logits, support = arguments["logits"], arguments["support"]
    with pytest.raises(ValueError, match=r"wanted=bool\[2\], expected a NumPy array bool\[1\]"):
        capture_masks(logits, support, verdict, np.ones(2, bool), 4)
    with pytest.raises(ValueError, match=r"max_support=0, expected at least 1"):
        capture_masks(logits, support, verdict, np.ones(1, bool), 0)
    with pytest.raises(ValueError, match=r"logits=\(2, 1, 4\), expected \(1, 2, V\)"):
        capture_masks(logits.reshape(2, 1, 4), support, verdict, np.ones(1, bool), 4)


def test_top_logprobs():
    logits, support = np.zeros((2, 4), F), select_support(**filter_arguments())
    with pytest.raises(ValueError, match=r"k=0, expected at least 1"):
        top_logprobs(logits, support, 0, np.zeros(1, I))
    with pytest.raises(ValueError, match=r"rows\[0\]=2, expected 0..1"):
        top_logprobs(logits, support, 1, np.full(1, 2, I))
    with pytest.raises(ValueError, match=r"support rows=2, expected 1"):
        top_logprobs(logits[:1], support, 1, np.zeros(1, I))


def test_random_numbers():
    with pytest.raises(ValueError, match=r"counter=uint32\[3\], expected a NumPy array uint32"):
        philox_4x32(np.zeros(3, np.uint32), np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match=r"positions\[0\]=-1, expected at least 0"):
        uniforms(np.zeros(1, np.uint64), np.array([-1]), 1, 0)
    with pytest.raises(ValueError, match=r"seeds=int64\[1\], expected a NumPy array uint64\[1\]"):
        uniforms(np.zeros(1, np.int64), np.array([0]), 1, 0)
    with pytest.raises(ValueError, match=r"seed=-1, expected 0..2\^64-1"):
        sample_seeds(-1, 1)
    with pytest.raises(ValueError, match=r"n=0, expected at least 1"):
        sample_seeds(0, 0)


def test_an_empty_batch():
    support = select_support(np.zeros((0, 4), F), *(np.zeros(0, kind) for kind in (F, I, F)), capacity=1)
    none = np.zeros((0, 1))
    verdict = verify_chain(np.zeros((0, 1, 4), F), support, np.zeros((0, 0), I), np.zeros(0, I), none, none)
    capture = capture_masks(np.zeros((0, 1, 4), F), support, verdict, np.zeros(0, bool), 1)
    assert capture.row_start.tolist() == [0]


def test_no_torch():
    code = "import sys, gpu; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
