"""Drafts drawn in the simulator, and verification by their laws, held against the host twins bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

import gpu
from tests.laws import law_of, make_drafting, tokens_of
from tests.rounds import make_round
from tests.simulator.backend import Simulated, up

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # silent where float64 isn't NumPy's


@pytest.mark.parametrize(
    ("dtype", "places", "order", "skew", "size", "in_turn", "capacity"),
    [
        ("float32", "by token", "top_k_first", 3, 300, False, 5),
        ("bfloat16", "by search", "joint", 0, 20, True, 40),
        ("float16", "by table", "joint", 9, 60, False, 5),
    ],
)
def test_draws_and_verdicts_are_the_host_twins(dtype, places, order, skew, size, in_turn, capacity):
    backend = Simulated(threads=32, skew=skew)
    batch, width, vocabulary = 3, 3, size if places == "by token" else 2 * size
    drafting = make_drafting(size, batch, width - 1, size, dtype)
    drawn = backend.draw_drafts(
        drafting.logits, drafting.parameters, drafting.uniforms, in_turn=in_turn, filter_order=order
    )
    law = law_of(drafting, drawn, places, vocabulary)
    tokens = np.take_along_axis(tokens_of(law), drawn.index[..., None], -1)[..., 0]
    round_ = replace(make_round(size, batch, width, vocabulary, "bfloat16"), drafts=tokens.astype(np.int32))
    support = backend.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=capacity)
    backend.verify_chain(round_.logits, support, round_.drafts, round_.num_drafts, *round_.coins, law)


def test_more_entries_than_are_written_down():
    """Whole rows, many blocks each or one: drawn by segments."""
    drafting = make_drafting(1, 1, 1, 4000, "bfloat16", num_poisoned=0)
    for values, value in zip(drafting.parameters, (1.3, 0, 1, 0), strict=True):
        values[:] = value
    for whole_rows in (False, True):
        Simulated(threads=128, whole_rows=whole_rows).draw_drafts(
            drafting.logits, drafting.parameters, drafting.uniforms
        )


@pytest.mark.parametrize(
    ("name", "dtype"), [("uniforms", np.float32), ("index", np.int32), ("top_k", np.int64), ("min_p", np.float64)]
)
def test_bad_arguments_launch_nothing(name, dtype):
    ones = np.ones(2, np.float32)
    arguments = {
        "logits": np.zeros((2, 1, 6), np.float32), "temperature": ones, "top_k": np.zeros(2, np.int32), "top_p": ones,
        "min_p": np.zeros(2, np.float32), "uniforms": np.full((2, 1), 0.5), "index": np.zeros((2, 1), np.int64),
    }  # fmt: skip
    good = {key: up(value) for key, value in arguments.items()}
    with Simulated().patched():
        out = gpu.draw_drafts(**good)
        with pytest.raises(ValueError, match=f"{name}={np.dtype(dtype)}"):
            gpu.draw_drafts(**{**good, name: up(arguments[name].astype(dtype))}, out=out)
        assert gpu.draw_drafts(**good, out=out).index.tolist() == [[3], [3]]
