"""Torch's memory and streams as the kernels see them."""

import gc
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from gpu import array_at, on_stream, release_memory


class OwningStream(nullcontext):
    """As CuPy 14.2 has it: what goes away destroys its stream, one of somebody else's too."""

    destroyed: list[int] = []  # noqa: RUF012

    @classmethod
    def from_external(cls, stream):
        own = cls()
        _, own.address = stream.__cuda_stream__()
        return own

    def __del__(self):
        self.destroyed.append(self.address)


def test_a_stream_of_somebody_else_s_is_never_destroyed(monkeypatch):
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Stream=OwningStream, runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for _ in range(3):
        with on_stream(123456):
            pass
    gc.collect()
    assert OwningStream.destroyed == []


@pytest.mark.gpu
def test_a_stream_goes_on_after_its_use_here():
    import torch

    stream = torch.cuda.Stream()
    for _ in range(3):
        with on_stream(stream.cuda_stream):
            pass
        gc.collect()
        with torch.cuda.stream(stream):
            ones = torch.ones(1000, device="cuda").sum()
        stream.synchronize()
        assert ones.item() == 1000


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_an_array_keeps_its_owner():
    import torch

    tensor = torch.ones(1 << 20, device="cuda")
    array = array_at(tensor.data_ptr(), tuple(tensor.shape), np.float32, None, tensor)
    before = torch.cuda.memory_allocated()
    del tensor
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert array.sum() == 1 << 20


@pytest.mark.gpu
def test_kernels_go_to_the_stream():
    import cupy
    import torch

    stream = torch.cuda.Stream()
    with on_stream(stream.cuda_stream):
        assert cupy.cuda.get_current_stream().ptr == stream.cuda_stream
    assert cupy.cuda.get_current_stream().ptr != stream.cuda_stream


@pytest.mark.gpu
def test_memory_goes_back():
    import cupy

    cupy.zeros(1 << 24, np.uint8)
    release_memory()
    assert cupy.get_default_memory_pool().free_bytes() == 0
