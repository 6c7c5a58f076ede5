"""Arguments of host and device mixed, and memory that a CUDA graph keeps using."""

import numpy as np
import pytest

from gpu import capture_masks, select_support, verify_chain
from tests.backends import DEVICE
from tests.device_door import capture_arguments, filter_arguments, verify_arguments

pytestmark = pytest.mark.gpu


def test_a_graph_leaves_the_memory_of_others_alone():
    """min_p=None: the zeros that stand for it go back to CuPy's pool, and every replay writes them again."""
    import cupy
    import torch

    rows = 64
    logits, one = cupy.zeros((rows, 1000), np.float32), cupy.ones(rows, np.float32)
    arguments = logits, one, cupy.full(rows, 5, np.int32), one.copy()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        out = select_support(*arguments, capacity=1000)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            select_support(*arguments, capacity=1000, out=out)
        others = [cupy.full(rows, 7, np.float32) for _ in range(64)]
        graph.replay()
        stream.synchronize()
        assert all((other.get() == 7).all() for other in others)


def test_device_records_beside_host_logits_are_refused():
    host, device = (verify_arguments(up) for up in (lambda array: array, DEVICE.up))
    with pytest.raises(ValueError, match="support"):
        verify_chain(**{**host, "support": device["support"]})


def test_host_records_beside_device_logits_are_refused():
    host, device = (capture_arguments(up) for up in (lambda array: array, DEVICE.up))
    for name in ("support", "verdict"):
        with pytest.raises(ValueError, match=name):
            capture_masks(**{**device, name: host[name]})


def test_draft_probs_that_are_no_array_are_refused():
    with pytest.raises(ValueError, match="draft_probs=list"):
        verify_chain(**{**verify_arguments(DEVICE.up), "draft_probs": [[[0.25] * 4]]})


def test_out_of_the_host_is_refused():
    host = filter_arguments(lambda array: array)
    arguments = filter_arguments(DEVICE.up)
    with pytest.raises(ValueError, match="out="):
        select_support(**arguments, out=select_support(**host))
    verdict = verify_chain(**verify_arguments(lambda array: array))
    with pytest.raises(ValueError, match="out="):
        verify_chain(**verify_arguments(DEVICE.up), out=verdict)
