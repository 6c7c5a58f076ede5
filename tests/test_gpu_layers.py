"""swiglu and turn_heads: both backends with one test body; on the host the device's part is the host's again."""

import numpy as np
import pytest

from gpu import swiglu, turn_heads
from tests import device_graph, device_layers
from tests.device_arrays import down, up
from tests.strategies import DTYPES


@pytest.fixture
def moves(backend):
    """To the backend and back."""
    if backend.name == "host":
        return np.copy, np.asarray
    return backend.up, backend.down


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(moves, dtype):
    device_layers.check_swiglu(*moves, dtype)
    device_layers.check_swiglu(*moves, dtype, count=1, width=2)
    device_layers.check_swiglu(*moves, dtype, count=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 3, 2, 16), (1, 1, 9, 3, 64), (8, 8, 4, 4, 4), (2, 1, 1, 1, 128)])
def test_turns(moves, dtype, shape):
    device_layers.check_turn(*moves, dtype, *shape)


@pytest.mark.gpu
def test_a_graph():
    first, second = np.random.default_rng(0).normal(size=(2, 2, 3, 40)).astype(np.float32)
    angles = np.zeros((2, 3, 8), np.float32)
    index = np.arange(6).reshape(2, 1, 3)
    rows, cosines, sines = up(first), up(np.cos(angles)), up(np.sin(angles))
    gated, places = up(np.zeros((6, 20), np.float32)), up(index)
    outs = [up(np.zeros(shape, np.float32)) for shape in ((2, 3, 3, 8), (6, 8), (6, 8))]

    def call():
        swiglu(rows.reshape(6, 40), gated)
        turn_heads(rows, cosines, sines, places, *outs)

    def change():
        rows.set(second)
        cosines.set(np.cos(angles + 1))
        sines.set(np.sin(angles + 1))

    device_graph.replay(call, change)
    of_gate, of_turn = np.empty((6, 20), np.float32), [np.zeros(out.shape, np.float32) for out in outs]
    swiglu(second.reshape(6, 40), of_gate)
    turn_heads(second, np.cos(angles + 1), np.sin(angles + 1), index, *of_turn)
    np.testing.assert_allclose(down(gated), of_gate, rtol=2e-6, atol=1e-7)
    for got, want in zip(outs, of_turn, strict=True):
        np.testing.assert_array_equal(down(got), want)


def test_other_arrays_are_refused(moves):
    up, _ = moves
    new = lambda *shape, dtype=np.float32: up(np.zeros(shape, dtype))  # noqa: E731
    for rows, out in (
        (new(3, 5), new(3, 2)),
        (new(3, 4), new(3, 3)),
        (new(3, 4), new(3, 2, dtype=np.float16)),
        (new(3, 4, dtype=np.int32), new(3, 2, dtype=np.int32)),
        (new(3, 6, dtype=np.uint16), new(3, 3, dtype=np.uint16)),
        (new(3, 8)[:, ::2], new(3, 2)),
        (new(3), new(3)),
        ([[1.0, 2.0]], new(1, 1)),
    ):
        with pytest.raises(ValueError, match="expected"):
            swiglu(rows, out)
    good = {
        "rows": new(2, 3, 20), "cosines": new(2, 3, 4), "sines": new(2, 3, 4), "index": new(2, 1, 3, dtype=np.int64),
        "queries": new(2, 3, 3, 4), "keys": new(30, 4), "values": new(30, 4),
    }  # fmt: skip
    for name, bad in (
        ("rows", new(2, 3, 16)),
        ("cosines", new(1, 3, 4)),
        ("sines", new(2, 3, 4, dtype=np.float16)),
        ("index", new(2, 1, 3, dtype=np.int32)),
        ("index", new(2, 3, dtype=np.int64)),
        ("queries", new(2, 3, 4)),
        ("keys", new(30, 5)),
        ("values", new(30, 8)[:, ::2]),
    ):
        with pytest.raises(ValueError, match="expected"):
            turn_heads(**{**good, name: bad})
    odd = {**good, "rows": new(2, 3, 15), "cosines": new(2, 3, 3), "sines": new(2, 3, 3), "queries": new(2, 3, 3, 3)}
    with pytest.raises(ValueError, match="multiple of 2"):
        turn_heads(**{**odd, "keys": new(30, 3), "values": new(30, 3)})
