"""A call as a CUDA graph: what a device must be able to do with every function that takes `out`."""


def replay(call, change):
    """Run `call` once, capture it in a graph, run `change`, then the graph; all on one stream."""
    import cupy

    cupy.cuda.Device().synchronize()  # the stream doesn't wait for what made the arrays
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()  # compiles and loads what a capture couldn't
        stream.begin_capture()
        call()
        graph = stream.end_capture()
        change()
        graph.launch(stream)
    stream.synchronize()
