"""The CUDA kernels against plain torch and FlashInfer, on one GPU in one run.

python -m benchmarks.kernels [--quick] [--seconds S] [--no-peers]       measure; benchmarks/results/kernels.json
python -m benchmarks.kernels --table [--into README.md]                 the Markdown tables of that file

A round is `batch` requests of 8 rows. Its logits are N(0, 3), or peaked: 64 likely tokens above N(., 2.5) that weigh
1 % together. The drafts are each row's argmax, and the coins are such that a draft is kept with probability 3/4: 3.6
tokens are committed on average. Stages add up: filter, +verify (a round without mask requests), +capture (the masks of
all that was committed), +pack (one asynchronous copy of verdicts and masks to pinned memory). Of an unfiltered row the
support is the vocabulary: its record is the 128 most probable tokens instead of a mask.

Times are medians of CUDA events. "graph": all input sets one after the other in one CUDA graph, divided by their
number; the sets together are at least twice the L2 cache. "alone": one call in a graph of its own. "eager": calls
launched one by one from Python, back to back. Before each graph replay a buffer of twice the L2 or more is read, so
that no input is cached and the launch of the graph isn't waited for.

The read floor is the size of the logits over the measured bandwidth of a device-to-device copy (bytes read and
written over time).

What the peers compute isn't the same: both cut ties at the k-th place by position, and FlashInfer draws its own
random numbers. They are given what favours them: no temperature, drafts' laws prepared outside the measured time,
top-k on the 16-bit logits. FlashInfer's draft law is scaled so that it keeps the same drafts.
"""
