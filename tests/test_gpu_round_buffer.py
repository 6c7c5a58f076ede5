"""RoundBuffer on a device, also with its copy in a CUDA graph."""

import pytest

from tests.backends import DEVICE, HOST, assert_same
from tests.device_round_buffer import check_room, check_rounds, check_sizes
from tests.rounds import make_round
from tests.rounds import run_round as want_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("relayed", [False, True])
def test_rounds_come_to_the_host(relayed):
    check_rounds(DEVICE, relayed)


def test_masks_that_do_not_fit():
    check_room(DEVICE)


def test_sizes():
    check_sizes()


@pytest.mark.parametrize(("batch", "width", "size", "halves"), [(4, 3, 300, 0), (20, 8, 248_320, 3)])
def test_the_copy_is_part_of_a_graph(batch, width, size, halves, monkeypatch):
    """Of many rows the graph's three rounds are each in two halves, one beside the reading of the other."""
    import cupy
    import torch

    from gpu import RoundBuffer, run_round
    from gpu.rounds import device as rounds_device

    branches, branch = [], rounds_device.branch
    monkeypatch.setattr(rounds_device, "branch", lambda: branches.append(1) or branch())
    round_ = make_round(63, batch, width, size, "bfloat16")
    up = DEVICE.to_device
    arguments = [
        *map(up, (round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted)),
        300,
    ]  # fmt: skip
    buffer, stream = RoundBuffer(batch, width, room=batch * width * 300), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        support, *_ = run_round(*arguments, capacity=300, out=(None, *buffer.out))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                run_round(*arguments, capacity=300, out=(support, *buffer.out))
                buffer.send()
        for _ in range(2):
            graph.replay()
        stream.synchronize()
    assert len(branches) == halves
    want = want_of(HOST, round_, "top_k_first", 300, 300)[1:]
    for got, expected in zip(buffer.view(0), want, strict=True):
        assert_same(got, expected)
