"""A call in a torch CUDA graph: what a device must be able to do with every function that takes `out`."""

import gpu


def replay(call, change):
    """Run `call` once, capture it in a graph, run `change`, then the graph; all on one stream."""
    import torch

    torch.cuda.synchronize()  # the stream doesn't wait for what made the arrays
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), gpu.on_stream(stream.cuda_stream):
        call()  # compiles and loads what a capture couldn't
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
        change()
        graph.replay()
    stream.synchronize()
