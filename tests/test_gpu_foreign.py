"""Torch's memory and streams as the kernels see them."""

import numpy as np
import pytest

from gpu import array_at, on_stream

pytestmark = pytest.mark.gpu


def test_an_array_is_the_same_memory():
    import cupy
    import torch

    tensor = torch.arange(24, dtype=torch.float32, device="cuda").reshape(4, 6)
    whole = array_at(tensor.data_ptr(), (4, 6), np.float32, None, tensor)
    part = array_at(tensor[:, ::2].data_ptr(), (4, 3), np.float32, (24, 8), tensor)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(whole.get(), np.arange(24, dtype=np.float32).reshape(4, 6))
    np.testing.assert_array_equal(part.get(), whole.get()[:, ::2])
    assert whole.flags.c_contiguous
    whole[1, 2] = -1
    cupy.cuda.Device().synchronize()
    assert tensor[1, 2].item() == -1
    assert array_at(0, (3, 0), np.int32, None, None).shape == (3, 0)


def test_an_array_keeps_its_owner():
    import gc

    import torch

    tensor = torch.ones(1 << 20, device="cuda")
    array = array_at(tensor.data_ptr(), tuple(tensor.shape), np.float32, None, tensor)
    before = torch.cuda.memory_allocated()
    del tensor
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert array.sum() == 1 << 20


def test_kernels_go_to_the_stream():
    import cupy
    import torch

    stream = torch.cuda.Stream()
    with on_stream(stream.cuda_stream):
        assert cupy.cuda.get_current_stream().ptr == stream.cuda_stream
    assert cupy.cuda.get_current_stream().ptr != stream.cuda_stream
