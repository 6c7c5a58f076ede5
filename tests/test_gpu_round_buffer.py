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


def test_the_copy_is_part_of_a_graph():
    import cupy
    import torch

    from gpu import RoundBuffer, run_round

    first, round_ = (make_round(seed, 4, 3, 300, "bfloat16") for seed in (64, 63))
    up = DEVICE.to_device

    def inputs(of):
        return of.logits, *of.parameters, of.drafts, of.num_drafts, *of.coins, of.wanted

    arguments = [*map(up, inputs(first)), 300]
    buffer, stream = RoundBuffer(4, 3, room=4 * 3 * 300), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        support, *_ = run_round(*arguments, capacity=300, out=(None, *buffer.out))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run_round(*arguments, capacity=300, out=(support, *buffer.out))
            buffer.send()
        for own, values in zip(arguments[:-1], inputs(round_), strict=True):
            own.set(values)
        graph.replay()
        stream.synchronize()
    want = want_of(HOST, round_, "top_k_first", 300, 300)[1:]
    for got, expected in zip(buffer.view(0), want, strict=True):
        assert_same(got, expected)
