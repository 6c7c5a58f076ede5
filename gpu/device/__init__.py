"""What the CUDA kernels share: instructions, block-wide operations, vectors of logits, launches, transfers."""
